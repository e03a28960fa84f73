"""Gluon kernels on this CPU: the product's own functions, run with stand-ins for the language and the device.

A launch is run program by program; the roles of a warp-specialised kernel are threads of which one runs at a time. The
device is unkind on purpose:

- shared memory starts as NaN, and a copy that was started lands only when somebody waits for it;
- the kernel before this one ends when no role can go on without it, and only then does ``previous`` write what it owed;
- a store to global memory before that end is a fault, because that kernel may still read there;
- a product reads its operands when it is waited for, and only what a fence made visible to it;
- an access outside a tensor, a deadlock, or a copy nobody waited for ends the run.

Registers, layouts and bank conflicts are not modelled: ``test_compile`` looks at those.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


class Fault(AssertionError):
    """The kernel did what a device does not forgive."""


class Type:
    """An element type as kernels see it."""

    def __init__(self, torch_type: torch.dtype) -> None:
        self.torch = torch_type
        self.primitive_bitwidth = torch_type.itemsize * 8


class Value(torch.Tensor):
    """A tensor or scalar in registers; ``to`` takes a ``Type``."""

    def to(self, target: Any) -> Any:  # type: ignore[override]
        return super().to(target.torch if isinstance(target, Type) else target)


def value(x: Any, kind: torch.dtype | None = None) -> Any:
    """``x`` in registers."""
    if isinstance(x, (Value, Pointer)):
        return x
    if kind is None and isinstance(x, int) and not isinstance(x, bool):
        kind = torch.int32
    return torch.as_tensor(x, dtype=kind).as_subclass(Value)


class Previous:
    """The kernel before: what it still has to write when a program starts (``owe``), and its end, which writes that."""

    def owe(self) -> None:
        """Take away what is not written yet."""

    def end(self) -> None:
        """Write it."""


@dataclass
class Program:
    """One program under way, and the machine around it."""

    ids: tuple[int, int]
    grid: tuple[int, int]
    warps: int
    previous: Previous
    previous_done: bool = False
    barriers: dict[int, Barrier] = field(default_factory=dict)
    unfenced: set[int] = field(default_factory=set)
    turn: threading.Condition = field(default_factory=threading.Condition)
    roles: list[Role] = field(default_factory=list)
    running: int = 0
    progress: int = 0
    clock: int = 0


@dataclass(eq=False)
class Role:
    """A partition of the program's warps."""

    warps: int
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    done: bool = False
    error: BaseException | None = None


@dataclass
class Barrier:
    """A barrier in shared memory, and the copies that land with its phase."""

    count: int
    pending: int
    phase: int = 0
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


_here = threading.local()
LIMIT_S = 300.0
QUIET = 4  # rounds without progress before the previous kernel ends


def _program() -> Program:
    found: Program = _here.program
    return found


def _role() -> Role:
    found: Role = _here.role
    return found


class Pointer:
    """Addresses in one tensor's storage: ``flat`` [elements], ``at`` an index tensor."""

    def __init__(self, flat: torch.Tensor, at: torch.Tensor, private: bool = False) -> None:
        self.flat, self.at, self.private = flat, at, private
        self.dtype = types.SimpleNamespace(element_ty=Type(flat.dtype))

    @staticmethod
    def to_tensor(tensor: torch.Tensor, private: bool = False) -> Pointer:
        """To the first element; ``private`` memory is no other kernel's, so it may be written at any time."""
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        flat = torch.as_strided(tensor, (elements,), (1,), 0)
        return Pointer(flat, torch.tensor(tensor.storage_offset()), private)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.flat, self.at + torch.as_tensor(other).as_subclass(torch.Tensor), self.private)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.flat, self.at[key], self.private)

    def _live(self, mask: Any) -> torch.Tensor:
        live = torch.ones_like(self.at, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        at, live = torch.broadcast_tensors(self.at, live.as_subclass(torch.Tensor))
        if bool((live & ((at < 0) | (at >= self.flat.numel()))).any()):
            raise Fault("access outside a tensor")
        return live

    def load(self, mask: Any, other: Any) -> torch.Tensor:
        live = self._live(mask)
        at = torch.where(live, self.at, 0)
        raw = self.flat.view(torch.uint8) if self.flat.dtype == torch.float8_e4m3fn else self.flat
        found = raw[at]
        found = torch.where(live, found, torch.as_tensor(0 if other is None else other).to(found.dtype))
        return found.view(self.flat.dtype)

    def store(self, x: Any, mask: Any) -> None:
        if not (self.private or _program().previous_done):
            raise Fault("a store before the kernel in front has ended")
        live = self._live(mask)
        x = torch.as_tensor(x).as_subclass(torch.Tensor).to(self.flat.dtype)
        at, x = torch.broadcast_tensors(self.at, x)
        self.flat[at[live]] = x[live]


class Shared:
    """A piece of shared memory: ``t`` views it, ``name`` identifies its allocation."""

    def __init__(self, t: torch.Tensor, name: int) -> None:
        self.t, self.name = t, name
        self.dtype = Type(t.dtype)
        self.shape, self.layout = list(t.shape), None

    def index(self, i: Any) -> Shared:
        return Shared(self.t[int(i)], self.name)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.t.permute(order), self.name)

    def _reinterpret(self, kind: Type, shape: list[int], layout: Any) -> Shared:
        flat = self.t.reshape(-1).view(torch.uint8).view(kind.torch)
        count = int(torch.Size(shape).numel())
        if count > flat.numel():
            raise Fault("reinterpreted beyond the allocation")
        return Shared(flat[:count].view(shape), self.name)

    def store(self, x: torch.Tensor) -> None:
        self.t.copy_(x.as_subclass(torch.Tensor))
        _program().unfenced.add(self.name)

    def load(self, layout: Any = None) -> Any:
        return self.t.clone().as_subclass(Value)


def _land(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for to, what in copies:
        to.copy_(what)
    copies.clear()


def _wait_until(ready: Callable[[], bool]) -> None:
    """Let the other roles run until ``ready``."""
    program, role = _program(), _role()
    quiet, seen = 0, -1
    while not ready():
        quiet = quiet + 1 if program.progress == seen else 0
        seen = program.progress
        if quiet > QUIET * len(program.roles):
            if program.previous_done:
                raise Fault("deadlock")
            program.previous.end()
            program.previous_done = True
            program.progress += 1
        _pass_on(program, role)
    program.progress += 1


def _bounded(program: Program, ready: Callable[[], bool]) -> None:
    if not program.turn.wait_for(ready, timeout=LIMIT_S):
        raise Fault(f"a role did not get its turn within {LIMIT_S} s")


def _pass_on(program: Program, role: Role) -> None:
    with program.turn:
        mine = program.roles.index(role)
        for step in range(1, len(program.roles) + 1):
            program.running = (mine + step) % len(program.roles)
            if not program.roles[program.running].done:
                break
        program.turn.notify_all()
        _bounded(program, lambda: program.running == mine)
        if any(r.error for r in program.roles):
            raise Fault("another role failed")


def _specialize(parts: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    """Run the roles, the one that leads first."""
    program = _program()
    outer = program.roles
    program.roles = [Role(w) for w in (program.warps, *warps)]
    program.running = 0

    def run(role: Role, body: Any, args: tuple[Any, ...]) -> None:
        _here.program, _here.role = program, role
        mine = program.roles.index(role)
        with program.turn:
            _bounded(program, lambda: program.running == mine)
        try:
            body(*args)
            if role.copies:
                raise Fault("a role ended with copies that nobody waited for")
        except BaseException as error:
            role.error = error
        role.done = True
        program.progress += 1
        with program.turn:
            left = [i for i, r in enumerate(program.roles) if not r.done]
            program.running = left[0] if left else -1
            program.turn.notify_all()

    threads = [
        threading.Thread(target=run, args=(role, body, args))
        for role, (body, args) in zip(program.roles, parts, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [r.error for r in program.roles if r.error is not None]
    program.roles = outer
    for error in sorted(errors, key=lambda e: str(e) == "another role failed"):
        raise error


class Product:
    """A matrix product that has been started; ``add`` is what it adds to, maybe another one."""

    def __init__(self, a: Shared, b: Shared, add: Any, use_acc: bool) -> None:
        self.a, self.b, self.add, self.use_acc = a, b, add, use_acc

    def result(self) -> torch.Tensor:
        for operand in (self.a, self.b):
            if operand.name in _program().unfenced:
                raise Fault("a product reads what no fence has made visible")
        before = self.add.result() if isinstance(self.add, Product) else self.add
        out = self.a.t.float() @ self.b.t.float()
        return out + before if self.use_acc else out


def _namespace(**entries: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**entries)


def _numbers(*xs: Any) -> list[Any]:
    return [value(x) for x in xs]


def _where(condition: Any, x: Any, y: Any) -> Any:
    kind = next((v.dtype for v in (x, y) if isinstance(v, torch.Tensor)), None)
    return torch.where(value(condition), value(x, kind), value(y, kind))


def _load(pointer: Pointer, mask: Any = None, other: Any = None, eviction_policy: str = "") -> Any:
    return pointer.load(mask, other).as_subclass(Value)


_allocations = iter(range(1, 1 << 60))


def _allocate(kind: Type, shape: list[int], layout: Any) -> Shared:
    count = int(torch.Size(shape).numel()) * kind.torch.itemsize
    raw = torch.full((count,), 0xFF, dtype=torch.uint8)
    return Shared(raw.view(kind.torch).view(shape), next(_allocations))


def _elementwise(f: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda *xs: f(*_numbers(*xs))


def _layout(*args: Any, **kwargs: Any) -> None:
    return None


LANGUAGE = _namespace(
    **{name: Type(getattr(torch, name)) for name in ("int32", "int64", "float16", "bfloat16", "float32")},
    arange=lambda start, end, layout=None: value(torch.arange(start, end, dtype=torch.int32)),
    full=lambda shape, x, kind, layout=None: value(torch.full(shape, x, dtype=kind.torch)),
    zeros=lambda shape, kind, layout=None: value(torch.zeros(shape, dtype=kind.torch)),
    load=_load,
    store=lambda pointer, x, mask=None: pointer.store(x, mask),
    where=_where,
    minimum=_elementwise(torch.minimum),
    maximum=_elementwise(torch.maximum),
    exp2=_elementwise(torch.exp2),
    log2=_elementwise(torch.log2),
    ceil=_elementwise(torch.ceil),
    abs=_elementwise(torch.abs),
    max=lambda x, axis: x.amax(axis),
    sum=lambda x, axis: x.sum(axis, dtype=x.dtype),
    cumsum=lambda x, axis: x.cumsum(axis, dtype=x.dtype),
    permute=lambda x, order: x.permute(order),
    convert_layout=lambda x, layout: x,
    program_id=lambda axis: value(_program().ids[axis]),
    num_programs=lambda axis: value(_program().grid[axis]),
    num_warps=lambda: _role().warps,
    thread_barrier=lambda: None,
    static_range=range,
    allocate_shared_memory=_allocate,
    warp_specialize=_specialize,
    **{
        name: _layout
        for name in (
            "BlockedLayout", "SliceLayout", "NVMMASharedLayout", "NVMMADistributedLayout", "SwizzledSharedLayout"
        )
    },
)  # fmt: skip


def _copy(to: Shared, pointer: Pointer, mask: Any = None) -> None:
    _role().copies.append((to.t, pointer.load(mask, 0).to(to.t.dtype)))
    _program().unfenced.add(to.name)


def _mbarrier_arrive(bar: Shared, increment_count: bool) -> None:
    assert not increment_count
    barrier = _program().barriers[bar.t.data_ptr()]
    barrier.copies += _role().copies
    _role().copies.clear()
    _arrive(barrier, 32 * _role().warps)


def _arrive(barrier: Barrier, count: int) -> None:
    barrier.pending -= count
    if barrier.pending < 0:
        raise Fault("more arrivals than a barrier expects")
    _program().progress += 1


def _barrier_wait(bar: Shared, phase: Any) -> None:
    barrier = _program().barriers[bar.t.data_ptr()]

    def over() -> bool:
        if barrier.phase & 1 != int(phase):
            return True
        if barrier.pending == 0:
            _land(barrier.copies)
            barrier.phase, barrier.pending = barrier.phase + 1, barrier.count
            return True
        return False

    _wait_until(over)


def _barrier_init(bar: Shared, count: int) -> None:
    _program().barriers[bar.t.data_ptr()] = Barrier(count, count)


ASYNC_COPY = _namespace(
    async_copy_global_to_shared=_copy,
    mbarrier_arrive=_mbarrier_arrive,
    commit_group=lambda: None,
    wait_group=lambda left: _land(_role().copies),
)
MBARRIER = _namespace(
    init=_barrier_init,
    wait=_barrier_wait,
    arrive=lambda bar: _arrive(_program().barriers[bar.t.data_ptr()], 1),
    MBarrierLayout=_layout,
)


def _clock(after: Any = None) -> Any:
    program = _program()
    program.clock += 1
    return value(program.clock)


CUDA = _namespace(
    gdc_wait=lambda: _wait_until(lambda: _program().previous_done),
    gdc_launch_dependents=lambda: None,
    globaltimer=_clock,
    smid=lambda: value(0),
)
NAMES = {
    "gl": LANGUAGE,
    "tl": LANGUAGE,
    "async_copy": ASYNC_COPY,
    "mbarrier": MBARRIER,
    "cuda": CUDA,
    "fence_async_shared": lambda: _program().unfenced.clear(),
    "warpgroup_mma": lambda a, b, add, use_acc=True, is_async=False: Product(a, b, add, use_acc),
    "warpgroup_mma_wait": lambda left, products: value(products[0].result()),
    "_clock": _clock,
    "_clock_after": _clock,
}


def _scalars(x: Any) -> Any:
    """What a device function returns, literal numbers as scalars."""
    if isinstance(x, tuple):
        return tuple(_scalars(y) for y in x)
    return value(x) if isinstance(x, (int, float)) else x


@contextmanager
def breaking(module: types.ModuleType, old: str, new: str) -> Iterator[None]:
    """For controls: functions of ``module`` run with ``new`` where their source says ``old``, which occurs once."""
    _broken[module.__name__] = (old, new)
    try:
        yield
    finally:
        del _broken[module.__name__]


_broken: dict[str, tuple[str, str]] = {}


_made: dict[tuple[int, tuple[str, str] | None], Callable[..., Any]] = {}


def _plain(kernel: Any) -> Callable[..., Any]:
    """The kernel as an ordinary function over the stand-ins, and so everything that it calls."""
    key = (id(kernel), _broken.get(kernel.fn.__module__))
    if key not in _made:
        _made[key] = _make(kernel)
    return _made[key]


def _make(kernel: Any) -> Callable[..., Any]:
    raw = kernel.fn
    names = dict(raw.__globals__)
    home = names["__name__"]
    if home in _broken:
        old, new = _broken[home]
        text = inspect.getsource(sys.modules[home])
        assert text.count(old) == 1, (old, text.count(old))
        text = "from __future__ import annotations\n" + text[text.index("@gluon.jit") :].replace(old, new)
        plain = _namespace(jit=lambda f: f)
        scratch: dict[str, Any] = {"gluon": plain, "triton": plain}
        exec(compile(text, home, "exec"), names | scratch, scratch)
        raw = scratch[raw.__name__]
    globals_: dict[str, Any] = {}
    for name, thing in names.items():
        if name in NAMES:
            globals_[name] = NAMES[name]
        elif hasattr(thing, "fn") and hasattr(thing, "arg_names"):
            globals_[name] = lambda *args, _kernel=thing, **kw: _scalars(_plain(_kernel)(*args, **kw))
        elif type(thing).__name__ == "constexpr":
            globals_[name] = thing.value
        elif isinstance(thing, types.ModuleType) and name == "stamps":
            globals_[name] = _module(thing)
        else:
            globals_[name] = thing
    return types.FunctionType(raw.__code__, globals_, raw.__name__, raw.__defaults__)


def _module(module: types.ModuleType) -> types.SimpleNamespace:
    entries: dict[str, Any] = {}
    for name, thing in vars(module).items():
        if hasattr(thing, "fn") and hasattr(thing, "arg_names"):
            entries[name] = lambda *args, _kernel=thing, **kw: _plain(_kernel)(*args, **kw)
        elif type(thing).__name__ == "constexpr":
            entries[name] = thing.value
    return types.SimpleNamespace(**entries)


def run(launch: Any, args: tuple[Any, ...], more: dict[str, Any], previous: Previous) -> None:
    """Run every program of ``launch`` (a ``launch.Launch``), each as if it were the first beside the kernel before."""
    names = launch.kernel.arg_names
    given = dict(zip(names, args, strict=False)) | more | launch.constants
    body = _plain(launch.kernel)
    bound = {}
    for name in names:
        x = given[name]
        if isinstance(x, torch.Tensor):
            x = Pointer.to_tensor(x, private=name == "trace")
        elif name not in launch.constants:
            x = value(x, torch.float32 if isinstance(x, float) else None)
        bound[name] = x
    for i in range(launch.grid[0]):
        for j in range(launch.grid[1]):
            warps = launch.options["num_warps"]
            program = Program((i, j), launch.grid, warps, previous)
            _here.program, _here.role = program, Role(warps)
            program.roles = [_here.role]
            previous.owe()
            body(**bound)
            if not program.previous_done:
                raise Fault("a program ended before the kernel in front of it")
