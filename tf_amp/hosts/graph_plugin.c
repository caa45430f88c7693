/* The graph plugin that TensorFlow calls: it decides without Python which graphs Python gets to see.

   Grappler calls the plugin for every graph of the process: those of sessions that scripts run, of
   functions, and of sessions that C++ code makes for itself (converters, importers, loaders) on
   threads of its own, possibly while their caller keeps Python's lock. Waiting for that lock there
   is waiting forever. So a graph goes to Python only if the thread that builds it is inside a call
   of Python's own session, which has given the lock away; everything else is answered here.

   A server (tf.distribute.Server) builds the graphs of its sessions on threads of its own. While a
   thread of Python is inside a call of such a session, other threads' graphs are laid out for a
   thread of Python to fetch. They wait for it for a limited time alone, since they may be anybody's.

   TensorFlow calls TF_InitGraph to register. Loaded by anybody else (a copy in tensorflow-plugins,
   TF_PLUGGABLE_DEVICE_LIBRARY_PATH) the library registers for a device type that no graph has:
   TensorFlow ends the process when TF_InitGraph reports an error or leaves the structures empty.

   The structures repeat the C interface of tensorflow/c/experimental/grappler/grappler.h, which
   has not changed from TensorFlow 2.17 to 2.21; no header of TensorFlow or Python is needed. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define SIZE_TO_END(type, last) (offsetof(type, last) + sizeof(((type*)0)->last))
#define ABORTED 10 /* "did nothing": Grappler keeps the graph and stays silent */

typedef void Optimize(void* seen, const void* graph, const void* item, void* output, void* status);

/* The toggles count 0 (default), 1 (off), 2 (on). All stay at default: a toggle of a plugin holds
   for the rest of the process, even after the rewrite was switched off. */
typedef struct {
  size_t struct_size;
  void* ext;
  int toggles[19];
} OptimizerConfigs;

typedef struct {
  size_t struct_size;
  void* ext;
  void* (*create)(void);
  Optimize* optimize;
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

/* What the session host sets. */
EXPORT int tf_amp_device = 0; /* what the next TF_InitGraph registers for: 1 CPU, 2 GPU */
EXPORT int tf_amp_open = 0;   /* whether graphs go to Python at all */
EXPORT Optimize* tf_amp_python[3] = {NULL, NULL, NULL};
EXPORT void (*tf_amp_set_status)(void* status, int code, const char* message) = NULL;

EXPORT int tf_amp_running = 0; /* how many graphs are on their way to Python or there */

/* How many threads are inside a call of a server's session, where a byte wakes the thread that
   fetches graphs (-1: there is none), and how many graphs it did not fetch in time. */
static int serving = 0;
EXPORT int tf_amp_bell = -1;
EXPORT int tf_amp_missed = 0;

#define NAP_NANOSECONDS 500000
EXPORT int tf_amp_patience = 10000; /* naps: 5 s or little more */

typedef struct {
  int device;
  const void *graph, *item;
  void *output, *status;
  int done;
} Request;

static Request* laid_out = NULL;

static __thread int inside = 0;

/* Called with Python's lock. */
EXPORT void tf_amp_enter(int served) {
  ++inside;
  __atomic_add_fetch(&serving, served, __ATOMIC_SEQ_CST);
}

EXPORT void tf_amp_leave(int served) {
  --inside;
  __atomic_sub_fetch(&serving, served, __ATOMIC_SEQ_CST);
}

/* For the child of a fork, which has none of the other threads. */
EXPORT void tf_amp_forget(void) {
  tf_amp_running = serving = 0;
  tf_amp_bell = -1;
  laid_out = NULL;
}

static void nap(void) {
  struct timespec time = {0, NAP_NANOSECONDS};
  nanosleep(&time, NULL);
}

static int swap_request(Request* old, Request* new) {
  return __atomic_compare_exchange_n(&laid_out, &old, new, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* Python's thread calls it, with the lock. */
EXPORT void tf_amp_fetch(void) {
  Request* request = __atomic_exchange_n(&laid_out, NULL, __ATOMIC_SEQ_CST);
  if (request != NULL) {
    tf_amp_python[request->device](NULL, request->graph, request->item, request->output,
                                   request->status);
    __atomic_store_n(&request->done, 1, __ATOMIC_SEQ_CST);
  }
}

/* Whether Python's thread fetched a graph in time; it is then done with it. No lock is held while
   waiting, so that a fork leaves none locked. */
static int fetched(Request* request) {
  int out = 0;
  for (int naps = 0; naps < tf_amp_patience; ++naps, nap()) {
    if (out && __atomic_load_n(&laid_out, __ATOMIC_SEQ_CST) != request) break;
    if (!out && (out = swap_request(NULL, request)) && write(tf_amp_bell, "", 1) != 1) break;
  }
  if (!out || swap_request(request, NULL)) {
    __atomic_add_fetch(&tf_amp_missed, 1, __ATOMIC_SEQ_CST);
    return 0;
  }
  while (!__atomic_load_n(&request->done, __ATOMIC_SEQ_CST)) nap();
  return 1;
}

/* Grappler makes one object for a graph and calls it in each of its rounds; the first one counts. */
static void* create(void) { return calloc(1, sizeof(int)); }

static void pass_on(int device, void* seen, const void* graph, const void* item, void* output,
                    void* status) {
  Request request = {device, graph, item, output, status, 0};
  int served = !inside && __atomic_load_n(&serving, __ATOMIC_SEQ_CST) > 0 && tf_amp_bell >= 0;
  int first = (inside || served) && seen != NULL && !*(int*)seen;
  /* Counted before the look at tf_amp_open: who closes it and then sees 0 knows that none comes. */
  __atomic_add_fetch(&tf_amp_running, 1, __ATOMIC_SEQ_CST);
  if (first) *(int*)seen = 1;
  if (first && !__atomic_load_n(&tf_amp_open, __ATOMIC_SEQ_CST)) first = 0;
  if (first && inside) {
    tf_amp_python[device](seen, graph, item, output, status);
  } else if (!first || !fetched(&request)) {
    tf_amp_set_status(status, ABORTED, "tf_amp: nothing done");
  }
  __atomic_sub_fetch(&tf_amp_running, 1, __ATOMIC_SEQ_CST);
}

static void optimize_cpu(void* seen, const void* graph, const void* item, void* output,
                         void* status) {
  pass_on(1, seen, graph, item, output, status);
}

static void optimize_gpu(void* seen, const void* graph, const void* item, void* output,
                         void* status) {
  pass_on(2, seen, graph, item, output, status);
}

EXPORT void TF_InitGraph(Params* params, void* status) {
  static const char* const types[] = {"TF_AMP_UNUSED", "CPU", "GPU"};
  (void)status;
  params->struct_size = SIZE_TO_END(Params, optimizer);
  params->device_type = types[tf_amp_device];
  params->configs->struct_size = SIZE_TO_END(OptimizerConfigs, toggles);
  params->optimizer->struct_size = SIZE_TO_END(Optimizer, destroy);
  params->optimizer->create = create;
  params->optimizer->optimize = tf_amp_device == 2 ? optimize_gpu : optimize_cpu;
  params->optimizer->destroy = free;
}
