/* The documented way into TensorFlow's graph-optimizer plugin API, as small as it can be.

   TensorFlow calls TF_InitGraph when it loads this library. The work is done in Python: the
   session host stores the address of its own function here and then has the library loaded.

   Loaded by anybody else (a copy in tensorflow-plugins, TF_PLUGGABLE_DEVICE_LIBRARY_PATH) there
   is no such function. TensorFlow ends the process when TF_InitGraph reports an error or leaves
   the structures empty, so the library then registers for a device type that no graph has.

   The structures repeat the C interface of tensorflow/c/experimental/grappler/grappler.h, which
   has not changed from TensorFlow 2.17 to 2.21; no header of TensorFlow is needed. */

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define SIZE_TO_END(type, last) (offsetof(type, last) + sizeof(((type*)0)->last))

typedef struct {
  size_t struct_size;
  void* ext;
  int toggles[19];
} OptimizerConfigs;

typedef struct {
  size_t struct_size;
  void* ext;
  void* (*create)(void);
  void (*optimize)(void*, const void*, const void*, void*, void*);
  void (*destroy)(void*);
} Optimizer;

typedef struct {
  size_t struct_size;
  void* ext;
  int32_t major_version, minor_version, patch_version;
  const char* device_type;
  OptimizerConfigs* configs;
  Optimizer* optimizer;
} Params;

EXPORT void (*tf_amp_init_graph)(void* params, void* status) = NULL;

static void optimize_nothing(void* self, const void* graph, const void* item, void* output,
                             void* status) {
  (void)self, (void)graph, (void)item, (void)output, (void)status;
}

EXPORT void TF_InitGraph(Params* params, void* status) {
  if (tf_amp_init_graph != NULL) {
    tf_amp_init_graph(params, status);
    return;
  }
  params->struct_size = SIZE_TO_END(Params, optimizer);
  params->device_type = "TF_AMP_UNUSED";
  params->configs->struct_size = SIZE_TO_END(OptimizerConfigs, toggles);
  params->optimizer->struct_size = SIZE_TO_END(Optimizer, destroy);
  params->optimizer->optimize = optimize_nothing;
}
