# ruff: noqa: SLF001  # private parts are what this module is for; every other file is free of them
"""Make torch and Triton compile for a GPU that is not there. The one room for their private parts that a bake touches.

`pretend` changes the whole process, for good: it belongs in a process of its own, started with the stand-in driver
(`stub.cpp`) preloaded. From then on a training step on fake tensors compiles what the same step compiles on the card,
under the same keys; compiled graphs hand back empty tensors of the right shapes, so that the step runs to its end.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from env.errors import Exit, Failure
from env.gpus import Gpu

READ_IN = {"2.10": "3.6", "2.11": "3.6", "2.15": "3.9"}
"""torch and the Triton it was read with. Names that moved since are not guessed: another version is refused."""

STUB = "DFLASH_STUB"
"""Variable with the path of the preloaded stand-in driver."""

CPU = torch.device("cpu")


def require_known_versions() -> None:
    """Refuse a torch or Triton whose private parts were never read.

    Raises:
        Failure: Exit.HOST, naming both versions and those that are known.
    """
    import triton  # type: ignore[import-untyped]  # has no types

    known = READ_IN.get(_minor(torch.__version__))
    if known != _minor(triton.__version__):
        pairs = ", ".join(f"torch {ours} with Triton {theirs}" for ours, theirs in READ_IN.items())
        raise Failure(
            Exit.HOST,
            f"baking without a GPU is not known to work with torch {torch.__version__} and Triton {triton.__version__}",
            details=[f"read and tried: {pairs}"],
            hint="bake with the locked environment (no `--interpreter`); a run on the GPU compiles for itself, too",
        )


def pretend(gpu: Gpu, *, index: int, count: int, outputs: Path) -> FakeTensorMode:
    """Let this process believe that it sees `count` of `gpu` and that device `index` is the current one.

    Args:
        gpu: the card's properties; a wrong one gives a miss or a badly tuned kernel, not an error.
        index: of the device that compiles; it is part of every key.
        count: devices that the process sees.
        outputs: folder where the shapes of each compiled graph's outputs are kept for a later process.

    Returns:
        the mode in which tensors have shapes and a device but no values; enter it to run a step.

    Raises:
        Failure: Exit.HOST, for a torch or Triton that was never read, or without the stand-in driver.
    """
    require_known_versions()
    stub = os.environ.get(STUB)
    if stub is None or stub not in os.environ.get("LD_PRELOAD", ""):
        raise Failure(Exit.HOST, f"the stand-in driver is not preloaded: `{STUB}` and LD_PRELOAD must name it")
    torch._C._ensureCUDADeviceGuardSet()  # torch's own guard that does nothing; before the stub claims devices
    _keep_constants_on_cpu()  # while torch still knows that there is no GPU
    # how many devices the autograd engine's loop runs over is not ours to say: let every index pass
    ctypes.CDLL(stub).dflash_stub_set(127, index)
    _pretend_device(gpu, index, count)
    _pretend_triton(gpu, index)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _stand_in_for_results(mode, outputs)
    _mend_annotations()
    return mode


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _put(target: Any, **values: Any) -> None:
    """Replace attributes that must exist: a name that is gone means that this torch was never read."""
    for name, value in values.items():
        if not hasattr(target, name):
            where = getattr(target, "__name__", repr(target))
            raise Failure(Exit.HOST, f"torch {torch.__version__} has no `{where}.{name}`, which a bake must replace")
        setattr(target, name, value)


class _Guard:
    """Stands for `torch.cuda.device(...)`."""

    def __init__(self, *_: object) -> None: ...
    def __enter__(self) -> _Guard:
        return self

    def __exit__(self, *_: object) -> None: ...


def _pretend_device(gpu: Gpu, index: int, count: int) -> None:
    """What torch asks about the device: properties, capability, current index, streams, memory."""
    import torch._dynamo.device_interface as interface
    import torch._subclasses.fake_tensor as fake_tensor
    from torch._inductor.codecache import CacheBase

    properties = types.SimpleNamespace(**gpu.properties())
    capability = (gpu.major, gpu.minor)
    stream = types.SimpleNamespace(cuda_stream=0, stream_id=0, device_index=index, device_type=1)

    def always(answer: Any) -> Callable[..., Any]:
        """A function of its own each time: dynamo keeps a handler for each, and takes none twice."""
        return lambda *_, **__: answer

    answers: dict[str, Any] = {
        "current_device": index,
        "set_device": None,
        "device_count": count,
        "current_stream": stream,
        "get_device_properties": properties,
        "synchronize": None,
        "memory_allocated": 0,
        "is_bf16_supported": True,
    }
    shared = {name: always(answer) for name, answer in answers.items()}
    _put(
        torch.cuda,
        **shared,
        is_available=always(True),
        is_initialized=always(True),
        _lazy_init=always(None),
        get_device_capability=always(capability),
        get_device_name=always(gpu.name),
        _exchange_device=always(index),
        _maybe_exchange_device=always(index),
        device=_Guard,
        mem_get_info=always((gpu.total_memory, gpu.total_memory)),
        get_rng_state=lambda *_: torch.zeros(16, dtype=torch.uint8),
        set_rng_state=always(None),
    )
    static = {**shared, "get_raw_stream": always(0), "exchange_device": always(index)}
    static["maybe_exchange_device"] = always(index)
    _put(interface.CudaInterface, **{name: staticmethod(value) for name, value in static.items()}, device=_Guard)
    interface.caching_worker_device_properties["cuda"] = [properties] * count
    interface.caching_worker_current_devices["cuda"] = index
    _put(torch._C, _cuda_getDevice=always(index))
    _put(torch.accelerator, current_device_index=always(index), is_available=always(True))
    _put(fake_tensor, init_gpu_context=always(None))
    CacheBase.get_system.cache_clear()


class _Utils:
    """Stands for the C module with which Triton loads kernels."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def get_device_properties(self, _: int) -> dict[str, int]:
        shared, processors = self.gpu.shared_memory_per_block_optin, self.gpu.multi_processor_count
        return {"max_shared_mem": shared, "multiprocessor_count": processors}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        del name, shared, device  # Triton itself compares the shared memory with what the device has
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel)
            file.flush()
            registers, spills = resources(Path(file.name))
        granted = max(8, -(-registers // 8) * 8)
        warps = self.gpu.regs_per_multiprocessor // (granted * self.gpu.warp_size)
        return 0, 0, registers, spills, min(self.gpu.max_threads_per_block, warps * self.gpu.warp_size)


class _Driver:
    """What Triton asks its active driver."""

    def __init__(self, gpu: Gpu, index: int) -> None:
        self.gpu, self.index, self.utils = gpu, index, _Utils(gpu)

    def launcher_cls(self, *_: object) -> Callable[..., None]:
        return lambda *_: None

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]  # has no types

        return GPUTarget("cuda", self.gpu.major * 10 + self.gpu.minor, self.gpu.warp_size)

    def get_current_device(self) -> int:
        return self.index

    def set_current_device(self, _: int) -> None: ...

    def get_current_stream(self, _: int = 0) -> int:
        return 0

    def get_device_capability(self, _: int = 0) -> tuple[int, int]:
        return self.gpu.major, self.gpu.minor

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.index)


def _pretend_triton(gpu: Gpu, index: int) -> None:
    """What Triton asks its driver, and what the launcher of inductor's kernels reads off a loaded kernel."""
    import torch._inductor.runtime.triton_helpers as helpers
    import triton

    handles = (0, 0) if _minor(torch.__version__) == "2.15" else (0,)  # since 2.13 a kernel's module comes first

    def load_kernel(path: str, name: str, shared: int, device: int) -> tuple[int, ...]:
        del device
        limit = gpu.shared_memory_per_block_optin
        if shared >= limit:
            # as the real loader says it; the autotuner then leaves this configuration out
            raise torch.cuda.OutOfMemoryError(f"out of resource: {name} Required: {shared} Hardware limit:{limit}")
        return (*handles, *resources(Path(path)))

    launcher = types.SimpleNamespace(_load_kernel=load_kernel, _unload_kernel=lambda _: None)
    _put(helpers, set_driver_to_gpu=lambda: None)
    _put(torch._C, _StaticCudaLauncher=launcher)  # imported where it is used
    triton.runtime.driver.set_active(_Driver(gpu, index))


def resources(cubin: Path) -> tuple[int, int]:
    """Registers a thread and spilled words of a kernel, as a driver would report them once it is loaded.

    Inductor compiles a smaller configuration of a reduction that takes too many registers: without this number a bake
    would leave that kernel out, and the first step on the card would compile it.
    """
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    report = subprocess.run([tool, "--dump-resource-usage", str(cubin)], check=True, capture_output=True, text=True)
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report.stdout)}
    return found["REG"], (found.get("STACK", 0) + found.get("LOCAL", 0)) // 4


def _keep_constants_on_cpu() -> None:
    """Inductor folds constants and traces its patterns on real tensors of the device: let it, on the CPU."""
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch.utils._python_dispatch import TorchDispatchMode

    class OnCpu(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            del kinds
            kwargs = dict(kwargs or {})
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
                kwargs["device"] = CPU
            return func(*args, **kwargs)

    folder = joint_graph.UniformValueConstantFolder
    deduce = folder._deduce_value

    def deduce_on_cpu(self: Any, node: Any) -> Any:
        with OnCpu():  # type: ignore[no-untyped-call]  # torch gives its modes no types
            return deduce(self, node)

    _put(folder, _deduce_value=deduce_on_cpu)
    # the device only carries the patterns' example tensors; what a pattern matches does not depend on it
    for module, init in ((joint_graph, joint_graph.lazy_init), (post_grad, post_grad.lazy_init)):
        prepare: Any = init  # torch's decorator hides that it takes a device, from 2.11 on
        given = () if _minor(torch.__version__) == "2.10" else (CPU,)
        prepare(*given)
        _put(module, lazy_init=lambda *_, prepare=prepare, given=given: prepare(*given))


def _stand_in_for_results(mode: FakeTensorMode, folder: Path) -> None:
    """Let a compiled graph return tensors without values instead of launching kernels.

    What a graph returns is noted where it is compiled, and kept in `folder` under the graph's key for a later process
    that takes the same graph from the cache.
    """
    from torch._inductor import compile_fx
    from torch._inductor.output_code import CompiledFxGraph

    compile_graph: Callable[..., Any] = compile_fx.fx_codegen_and_compile
    noted: dict[int, tuple[Any, list[Any]]] = {}

    def compile_and_note(graph: Any, *args: Any, **kwargs: Any) -> Any:
        shapes = [_shape(output) for output in graph.graph.output_node().args[0]]
        compiled = compile_graph(graph, *args, **kwargs)
        for shape, strides in zip(shapes, compiled.output_strides or [], strict=False):
            if shape is not None and strides is not None:
                shape["stride"] = [int(str(stride)) for stride in strides]
        noted[id(compiled)] = (compiled, shapes)  # the graph is kept, so that its id stays its own
        return compiled

    def call(self: Any, inputs: list[Any]) -> list[Any]:
        inputs.clear()  # a compiled graph takes its inputs over
        key = self._fx_graph_cache_key
        path = folder / f"{key}.json"
        if id(self) in noted:
            shapes = noted[id(self)][1]
            if key is not None and not path.exists():
                path.write_text(json.dumps(shapes), encoding="utf-8")
        else:
            shapes = json.loads(path.read_text(encoding="utf-8"))
        with mode:
            return [None if shape is None else _empty(shape) for shape in shapes]

    folder.mkdir(parents=True, exist_ok=True)
    _put(compile_fx, fx_codegen_and_compile=compile_and_note)
    _put(CompiledFxGraph, __call__=call)


def _shape(output: Any) -> dict[str, Any] | None:
    value = output.meta.get("val") if isinstance(output, torch.fx.Node) else output
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        raise Failure(Exit.TRAINING, f"a graph returns {value!r}: only graphs of fixed shapes can be baked")
    return {
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": str(value.device),
    }


def _empty(shape: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, shape["dtype"])
    return torch.empty_strided(shape["shape"], shape["stride"], dtype=dtype, device=shape["device"])


def _mend_annotations() -> None:
    """A graph's inputs are annotated with their Python type, which is in AOTAutograd's key: FakeTensor would miss."""
    from torch._inductor import compile_fx

    compile_graph = compile_fx.compile_fx

    def mended(graph: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if isinstance(graph, torch.fx.GraphModule):
            for node in graph.graph.find_nodes(op="placeholder"):
                if getattr(node.type, "__name__", "") == "FakeTensor":
                    value = node.meta.get("example_value")
                    parameter = isinstance(value, torch.nn.Parameter) or getattr(value, "_is_param", False)
                    node.type = torch.nn.Parameter if parameter else torch.Tensor
            graph.recompile()
            inputs = [_of_this_compilation(one) for one in inputs]
        return compile_graph(graph, inputs, *args, **kwargs)

    _put(compile_fx, compile_fx=mended)


def _of_this_compilation(value: Any) -> Any:
    """A tensor without values as one that this compilation has made: torch 2.10 does not do this itself."""
    context = torch._guards.TracingContext.try_get()
    if _minor(torch.__version__) != "2.10" or not isinstance(value, FakeTensor) or context is None:
        return value
    if context.fake_mode is None or value.fake_mode is context.fake_mode:
        return value
    return context.fake_mode.from_tensor(value, static_shapes=True)
