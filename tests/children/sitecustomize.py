"""Python loads this at the start of every process of the tests, for conftest puts its folder on the path.

A framework's import leaves a million objects and hardly a cycle among them: looking for some all the while is an eighth
of a short script's time. And the first optimizer of a process loads PyTorch's compiler, which takes as long as PyTorch
itself, only to tell it that it shall not look inside; here optimizers tell it so once something else has loaded it, and
torchvision asks it for a function of its own when it needs that one.
Scripts that are measured here are compared with each other, not with those of users. A capture looks on for two
seconds of a processor, not four: what the small scripts of the tests do after an epoch, they do within one.
"""

import functools
import gc
import importlib.abc
import importlib.util
import sys
from types import ModuleType

gc.set_threshold(100_000, 50, 100)


def _late(plain, told):
    """Calls the function that tells the compiler where there is one, else the plain one."""

    @functools.wraps(plain)
    def called(*args, **kwargs):
        return (told if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

    return called


def _decorate_late(torch_compile):
    given = torch_compile._disable_dynamo

    def disable(fn=None, recursive=True):
        if fn is None:
            return functools.partial(disable, recursive=recursive)
        return _late(fn, given(fn, recursive))

    torch_compile._disable_dynamo = disable


def _step_late(torch_optimizer):
    given = torch_optimizer._use_grad_for_differentiable

    def use_grad(func):
        @functools.wraps(func)
        def step(optimizer, *args, **kwargs):
            with torch_optimizer.torch.set_grad_enabled(optimizer.defaults["differentiable"]):
                return func(optimizer, *args, **kwargs)

        return _late(step, given(func))

    torch_optimizer._use_grad_for_differentiable = use_grad


def _ask_late(load, module):
    """Loads a module that takes a function from the compiler's tools."""

    def is_compile_supported(device):
        return importlib.import_module("torch._dynamo.utils").is_compile_supported(device)

    names = "torch._dynamo", "torch._dynamo.utils"
    if names[0] in sys.modules:
        return load(module)
    sys.modules.update({name: ModuleType(name) for name in names})
    sys.modules[names[1]].is_compile_supported = is_compile_supported
    try:
        load(module)
    finally:
        for name in names:
            del sys.modules[name]


def _after(change):
    """Loads a module, then changes it."""

    def load_and_change(load, module):
        load(module)
        change(module)

    return load_and_change


def _look_on_briefly(pauses):
    pauses._CPU_S = 2.0


LOADED_BY = {
    "torch._compile": _after(_decorate_late),
    "torch.optim.optimizer": _after(_step_late),
    "torchvision.ops.roi_align": _ask_late,
    "forerun.script.capturing.pauses": _after(_look_on_briefly),
}


class _Finder(importlib.abc.MetaPathFinder):
    """First on the list of finders; gives some modules another way to be loaded."""

    def find_spec(self, fullname, path, target=None):
        if fullname not in LOADED_BY:
            return None
        load = LOADED_BY.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            spec.loader.exec_module = functools.partial(load, spec.loader.exec_module)
        return spec


if "forerun.script.capturing.pauses" in sys.modules:  # a captured script gets here after what captures it
    _look_on_briefly(sys.modules["forerun.script.capturing.pauses"])
sys.meta_path.insert(0, _Finder())
