"""TensorFlow's graph-optimizer plugin API: registration, and graphs handed to Python.

The interface is ``tensorflow/c/experimental/grappler/grappler.h``: a plugin fills a registration
structure once, and from then on Grappler hands it every graph that has a node on its device. What
TensorFlow calls is C (``graph_plugin.c``, a shared object that is built with the package): it lets
a graph through to Python only on a thread that is inside a call of Python's own session, and
answers everything else without Python. A callback of ctypes would wait for Python's lock each
time, and a C++ caller that holds the lock meanwhile would never return. Graphs of a server's
sessions are built on threads of the server: a thread of Python fetches them (`GraphPlugin.serve`),
which they wait for a few seconds at most.

Two ways into the registry, tried in this order:

1. ``tensorflow::grappler::InitGraphPlugin(function)`` of libtensorflow_cc, called through ctypes.
   It leaves the devices alone: nothing is listed or initialized again, so visible devices and
   memory growth stay as the program set them. It is an internal symbol, present in every release
   of the supported range.
2. The documented way: TensorFlow loads the shared object and calls its ``TF_InitGraph``. That is
   done by the C function beneath ``load_pluggable_device_library``, because the Python function
   resets the device settings.

Registration is for the life of the process, and TensorFlow ends the process when one device type
is registered twice. What was registered is therefore remembered on a module of TensorFlow
itself, where a second copy or a reload of this package finds it.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import logging
import os
import site
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from tf_amp.hosts.c_api import CApiError
from tf_amp.hosts.session_c_api import (
    ABORTED,
    FETCH_LIST,
    INIT_FUNCTION,
    OPTIMIZE_FUNCTION,
    PRESERVE_LIST,
    AbslStatus,
    Library,
)
from tf_amp.hosts.session_shapes import GraphShapes
from tf_amp.patches import Patches

LOGGER = logging.getLogger("tf_amp.hosts.session")

DEVICE_TYPES = ("CPU", "GPU")

_INIT_GRAPH_PLUGIN = (
    "_ZN10tensorflow8grappler15InitGraphPluginEPFvP30TP_OptimizerRegistrationParamsP10TSL_StatusE"
)
_SHARED_OBJECT = Path(__file__).with_name("libtf_amp.so")
_SLOT_ATTRIBUTE = "_tf_amp_graph_plugin"
_EXIT_PATIENCE_SECONDS = 5.0
# After which a C callback has surely returned to TensorFlow.
_BACK_SECONDS = 0.05
# The calls in which a session builds and optimizes a graph, on the thread of the caller.
_BUILDING_CALLS = (
    "TF_SessionRun_wrapper",
    "TF_SessionPRunSetup_wrapper",
    "TF_SessionMakeCallable",
)


class GraphItem(NamedTuple):
    """One graph as Grappler hands it over.

    Attributes:
        device_type: "CPU" or "GPU": the registration that was called.
        graph: Serialized GraphDef.
        preserve: Names of nodes that must keep name, dtype and value: feeds, fetches, queue and
            initialization nodes.
        fetches: Names of the nodes that are fetched or run.
        shapes: Static shapes of the graph; None if there are none.
        fed: The shapes of the arrays that the call feeds, by tensor; none where it only prepares.
        session: TensorFlow's own session that is called; None where a server builds the graph.
    """

    device_type: str
    graph: bytes
    preserve: tuple[str, ...]
    fetches: tuple[str, ...]
    shapes: GraphShapes | None = None
    fed: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    session: Any = None


Handler = Callable[[GraphItem], "bytes | None"]
"""Returns the serialized new graph, or None for "nothing done"."""


class GraphPlugin:
    """The one plugin of a process: what is registered, and who handles the graphs.

    Holds no lock, so that a fork in the middle of a callback leaves nothing locked in the child.
    """

    def __init__(self, library: Library, gate: ctypes.PyDLL) -> None:
        self._library = library
        self._gate = gate
        self._handler: Handler | None = None
        self._patches = Patches()
        try:
            self._device = ctypes.c_int.in_dll(gate, "tf_amp_device")
            self._open = ctypes.c_int.in_dll(gate, "tf_amp_open")
            self._running = ctypes.c_int.in_dll(gate, "tf_amp_running")
            self._bell = ctypes.c_int.in_dll(gate, "tf_amp_bell")
            self._missed = ctypes.c_int.in_dll(gate, "tf_amp_missed")
            self._patience = ctypes.c_int.in_dll(gate, "tf_amp_patience")
            self._python = (ctypes.c_void_p * 3).in_dll(gate, "tf_amp_python")
            set_status = ctypes.c_void_p.in_dll(gate, "tf_amp_set_status")
        except ValueError as error:
            raise CApiError(
                f"{gate._name} was built from another version of this package (install tf-amp "
                f"again): {error}"
            ) from error
        function: Any = library.set_status
        set_status.value = ctypes.cast(function, ctypes.c_void_p).value
        self._registered: dict[str, object] = {}
        self._served: weakref.WeakSet[Any] = weakref.WeakSet()
        self._calls = threading.local()
        self._said_missed = False
        atexit.register(self._wait_at_exit)
        os.register_at_fork(after_in_child=gate.tf_amp_forget)

    @property
    def handler(self) -> Handler | None:
        """Called for each graph of a session; None while the rewrite is off."""
        return self._handler

    @handler.setter
    def handler(self, handler: Handler | None) -> None:
        self._open.value = 0
        self._patches.undo()
        self._handler = handler
        if handler is not None:
            self._patches = Patches()
            self._mark_calls()
            self._open.value = 1

    def _mark_calls(self) -> None:
        """Tells the shared object which threads are inside a call of Python's session."""
        from tensorflow.python.client import pywrap_tf_session

        enter, leave = self._gate.tf_amp_enter, self._gate.tf_amp_leave

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def marked(session: Any, *args: Any, **kwargs: Any) -> Any:
                served = session in self._served
                self._calls.session, self._calls.arguments = session, args
                enter(served)
                try:
                    return original(session, *args, **kwargs)
                finally:
                    leave(served)
                    self._calls.session, self._calls.arguments = None, ()
                    if served:
                        self._say_missed()

            return marked

        for name in _BUILDING_CALLS:
            self._patches.replace(pywrap_tf_session, name, make)

    def _fed(self) -> dict[str, tuple[int, ...]]:
        """What the call of this thread feeds; a thread that fetches for a server is in none."""
        from tensorflow.python.client import pywrap_tf_session

        found = {}
        for feeds in getattr(self._calls, "arguments", ()):
            if isinstance(feeds, dict):
                for tensor, value in feeds.items():
                    name = pywrap_tf_session.TF_OperationName(tensor.oper)
                    found[f"{name}:{tensor.index}"] = tuple(value.shape)
        return found

    def serve(self, session: Any) -> None:
        """Lets graphs through that a server of this process builds for a session.

        Args:
            session: TensorFlow's own session, inside Python's.
        """
        self._served.add(session)
        if self._bell.value < 0:
            heard, self._bell.value = os.pipe()
            threading.Thread(target=self._fetch, args=(heard,), daemon=True).start()

    def _fetch(self, heard: int) -> None:
        try:
            while os.read(heard, 1):
                self._gate.tf_amp_fetch()
        except OSError as error:  # somebody closed all files of the process
            self._bell.value = -1
            LOGGER.warning("AMP is on, but sessions of servers stay as they are now: %s", error)

    def _say_missed(self) -> None:
        if self._missed.value and not self._said_missed:
            self._said_missed = True
            LOGGER.warning(
                "AMP is on, but a graph that was built while a server's session ran stays as "
                "it is: Python was busy for five seconds."
            )

    def register(self, device_type: str) -> None:
        """Registers for one device type; does nothing when that was done before.

        Raises:
            CApiError: if neither way into TensorFlow's registry is there.
        """
        if device_type in self._registered:
            return
        number = 1 + DEVICE_TYPES.index(device_type)
        callback = OPTIMIZE_FUNCTION(self._optimizer_for(device_type))
        # TensorFlow calls it until the process has ended, later than the interpreter frees its
        # objects.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))
        self._python[number] = ctypes.cast(callback, ctypes.c_void_p).value
        self._device.value = number
        try:
            self._call_registry()
        finally:
            self._device.value = 0
        self._registered[device_type] = callback

    def _call_registry(self) -> None:
        try:
            init_graph_plugin = self._library.find(_INIT_GRAPH_PLUGIN, AbslStatus, INIT_FUNCTION)
        except CApiError:
            from tensorflow.python.client import pywrap_tf_session

            pywrap_tf_session.TF_LoadPluggableDeviceLibrary(self._gate._name)
            return
        if not init_graph_plugin(INIT_FUNCTION(("TF_InitGraph", self._gate))).ok():
            raise CApiError("TensorFlow refused the plugin's registration")

    def _optimizer_for(self, device_type: str) -> Callable[..., None]:
        def optimize(_seen: int, graph: Any, item: int, output: Any, status: int) -> None:
            rewritten = None
            shapes = GraphShapes(self._library, item)
            try:
                if (handler := self._handler) is not None:
                    rewritten = handler(
                        GraphItem(
                            device_type,
                            ctypes.string_at(graph.contents.data or 0, graph.contents.length),
                            self._library.names(PRESERVE_LIST, item),
                            self._library.names(FETCH_LIST, item),
                            shapes,
                            self._fed(),
                            getattr(self._calls, "session", None),
                        )
                    )
                if rewritten is not None:
                    # No bytes would be read as a graph without nodes, which fails at run time.
                    if not rewritten:
                        raise ValueError("the rewritten graph is empty")
                    self._library.hand_over(output, rewritten)
            except KeyboardInterrupt:
                # No exception may leave a C callback: it is raised anew once TensorFlow is back.
                rewritten = None
                threading.Timer(_BACK_SECONDS, _thread.interrupt_main).start()
            except BaseException as error:
                rewritten = None
                LOGGER.error(
                    "session host: %s: %s; the original graph runs", type(error).__name__, error
                )
            finally:
                shapes.close()
                if not rewritten:
                    self._library.set_status(status, ABORTED, b"tf_amp: nothing done")

        return optimize

    def _wait_at_exit(self) -> None:
        # A thread that comes back into Python after the interpreter is gone takes the process
        # down. From here on none comes in; those under way get time to finish.
        self.handler = None
        deadline = time.monotonic() + _EXIT_PATIENCE_SECONDS
        while self._running.value and time.monotonic() < deadline:
            time.sleep(0.005)


def load_gate(path: Path) -> ctypes.PyDLL:
    """Loads the shared object that TensorFlow calls.

    Raises:
        CApiError: if it was not built or cannot be loaded.
    """
    if not path.exists():
        raise CApiError(
            f"{path.name} was not built (install tf-amp from a wheel, or from source where a C "
            "compiler is)"
        )
    try:
        return ctypes.PyDLL(str(path))
    except OSError as error:
        raise CApiError(f"{path} cannot be loaded: {error}") from error


def foreign_plugins() -> list[str]:
    """Returns paths of graph-optimizer plugins of others that this process has loaded.

    TensorFlow loads what lies in ``tensorflow-plugins`` beside it and what
    ``TF_PLUGGABLE_DEVICE_LIBRARY_PATH`` names, and has no way to ask for which device types those
    have registered; registering one of them again would end the process.
    """
    folders = [Path(p) for p in (*sys.path, *site.getsitepackages()) if p]
    candidates = {
        str(path) for folder in folders for path in (folder / "tensorflow-plugins").glob("*.so")
    }
    if named := os.environ.get("TF_PLUGGABLE_DEVICE_LIBRARY_PATH"):
        candidates.add(named)
    mode = getattr(os, "RTLD_NOLOAD", 0) | getattr(os, "RTLD_NOW", ctypes.DEFAULT_MODE)
    found = []
    for path in sorted(candidates):
        try:
            library = ctypes.CDLL(path, mode=mode)
        except OSError:
            continue
        # A copy of our own library, loaded by somebody else, registers for no real device.
        if hasattr(library, "TF_InitGraph") and not hasattr(library, "tf_amp_device"):
            found.append(path)
    return found


def graph_plugin(tensorflow: ModuleType) -> GraphPlugin:
    """Returns the plugin of this process, registered for every device type.

    Args:
        tensorflow: The imported TensorFlow package.

    Raises:
        CApiError: if another graph plugin is loaded, the shared object was not built, or
            no way into the registry exists.
    """
    from tensorflow.python.client import pywrap_tf_session

    plugin: GraphPlugin | None = getattr(pywrap_tf_session, _SLOT_ATTRIBUTE, None)
    if plugin is None:
        if others := foreign_plugins():
            raise CApiError(
                f"another graph plugin is loaded ({', '.join(others)}), and TensorFlow ends the "
                "process when two register for one device type (remove that plugin)"
            )
        library = Library(Path(str(tensorflow.__file__)).parent)
        plugin = GraphPlugin(library, load_gate(_SHARED_OBJECT))
        setattr(pywrap_tf_session, _SLOT_ATTRIBUTE, plugin)
    for device_type in DEVICE_TYPES:
        plugin.register(device_type)
    return plugin
