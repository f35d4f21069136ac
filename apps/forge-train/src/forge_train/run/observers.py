"""Calls of hooks. A hook that only observes cannot end a run.

Its exception is logged and counted, and training continues as if the hook had not been called. After three failures on all
ranks the hook is switched off, and the run ends with exit code 9.

With several ranks, a failure is harmless only if no other rank waits for this one inside the call. Each successful call
increments `Watch.calls`, which the thread of the watch publishes. A rank whose call fails reports that in the store and waits
until every other rank has failed in the same call or has completed it. If another rank waits in a collective of that call, the
failure ends the run on this rank, and all other ranks name it as the cause.
"""

import logging
import random
import sys
import traceback
from collections import Counter
from typing import Any

import torch

from forge_core.errors import ForgeError
from forge_core.protocols.run import Hook
from forge_parallel.launch.watch import is_broken_connection
from forge_train.hooks.save import Save
from forge_train.process.stop import HOOK_FAILED
from forge_train.run.health import RollBack

_log = logging.getLogger(__name__)

MOST = 3
"""Number of failures of one hook, on all ranks, after which it is switched off."""
_REFUSED = (1, 2)
_TOGETHER_SECONDS = 5.0


class Calls:
    """The calls of one run's hooks; the `run` of its methods is a `forge_train.run.run.Run`, which has this object.

    Attributes:
        failures: number of failures of each hook on this rank, by name.
        off: names of the hooks that are switched off.
        failed_last: names of the hooks whose `finish` failed.
    """

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self.off: set[str] = set()
        self.failed_last: set[str] = set()
        self._together: Counter[int] = Counter()
        self._training: list[torch.nn.Module] | None = None
        self._of_host: tuple[int, dict[str, Any]] = (-1, {})

    @property
    def exit_code(self) -> int:
        """`HOOK_FAILED` if a hook was switched off or its `finish` failed, else 0."""
        return HOOK_FAILED if self.off or self.failed_last else 0

    def __call__(self, run: Any, method: str, *arguments: Any) -> None:
        """Collective: calls a method of every hook, in the order of the recipe.

        Raises:
            Exception: the exception of a hook that acts on training, or one that means that the run cannot continue.
        """
        if self._training is None:
            self._training = [module for part in run.model.parts for module in part.modules() if module.training]
        before = None
        for place, hook in enumerate(run.hooks):
            call = getattr(hook, method)
            if getattr(call, "__func__", None) is getattr(Hook, method):  # the hook does not override it
                continue
            paused = run.clock.paused
            if not hook.observes:
                self._act(run, hook, method, *arguments)
                run.clock.blame(name_of(hook), paused)
                continue
            if self._together[place] >= MOST:
                continue
            before = before or self._generators(run)  # observers do not change them, so one copy serves all calls
            try:
                call(run, *arguments)
            except Exception as error:
                if _ends_run(error):
                    raise
                self._failed(run, place, method, error)
                self._restore(run, method, before)
            run.clock.blame(name_of(hook), paused)
            run.watch.calls += 1

    def _act(self, run: Any, hook: Hook, method: str, *arguments: Any) -> None:
        try:
            getattr(hook, method)(run, *arguments)
        except Exception as error:
            if not _ends_run(error):
                _log.error("hook %r failed in %s at step %d, and the run ends", name_of(hook), method, run.state.step)
            raise

    def _failed(self, run: Any, place: int, method: str, error: Exception) -> None:
        """Collective among the ranks that fail in this call: counts a failure, and ends the run if other ranks wait inside."""
        hook, watch = run.hooks[place], run.watch
        name = name_of(hook)
        cause = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
        _log.info("hook %r failed:\n%s", name, "".join(traceback.format_exception(error)))
        said = f"hook {name!r} failed in {method} at step {run.state.step}: {cause}"
        alike = run.topology.size == 1 or watch.failed_in(watch.calls)
        if alike is None:
            error.add_note(f"{said}; other ranks wait for this rank inside the hook, so the run cannot continue")
            _log.error("%s; other ranks wait for this rank inside the hook, so the run ends", said)
            raise error
        self.failures[name] += 1
        self._together[place] += alike
        if method == "finish":
            self.failed_last.add(name)
        off = self._together[place] >= MOST
        if off:
            self.off.add(name)
        end = f"the hook is switched off after {MOST} failures" if off else "training is not affected"
        where = "" if alike else f" on rank {run.topology.rank} alone"
        run.health.warn(f"{said}{where}; the run continues, {end}")
        if not run.health.warns:  # rank 0 does not report the failures of other ranks
            _log.error("%s%s; the run continues, %s", said, where, end)

    def _restore(self, run: Any, method: str, before: dict[str, Any]) -> None:
        """Restores what a failed hook may have changed: random generators, modes of modules and autograd, gathered weights,
        gradients."""
        torch.set_grad_enabled(True)
        training = {id(module) for module in self._training or ()}
        for part in run.model.parts:
            for module in part.modules():
                module.training = id(module) in training
        run.model.leave_inference()
        if method != "before_update":  # there the gradients are those of the step
            run.optimizer.zero_grad()
        random.setstate(before["python"])
        torch.set_rng_state(before["torch"])
        if "numpy" in before:
            sys.modules["numpy"].random.set_state(before["numpy"])
        if "device" in before:
            getattr(torch, run.topology.device.type).set_rng_state(before["device"], run.topology.device)

    def _generators(self, run: Any) -> dict[str, Any]:
        """Returns the states of all random generators. Training uses those of torch only, so others are read once per step."""
        if self._of_host[0] != run.state.step:
            numpy = {"numpy": sys.modules["numpy"].random.get_state()} if "numpy" in sys.modules else {}
            self._of_host = run.state.step, {"python": random.getstate(), **numpy}
        found = {"torch": torch.get_rng_state(), **self._of_host[1]}
        if run.topology.device.type != "cpu":
            found["device"] = getattr(torch, run.topology.device.type).get_rng_state(run.topology.device)
        return found


def rescue(run: Any, error: Exception) -> None:
    """Collective among the ranks that fail together: saves the newest complete step before an error ends the run.

    Does nothing if the run has no hook `save`, the step is saved already, or the state may be bad. A failure of this save is
    logged only, because the first error is the one to report.
    """
    keeps = [hook for hook in run.hooks if isinstance(hook, Save)]
    if _ends_run(error) or not keeps or not run.state.complete or any(hook.acted == run.state.step for hook in keeps):
        return
    try:
        if run.topology.size == 1 or run.watch.all_fail(run.state.step, _TOGETHER_SECONDS):
            run.model.leave_inference()
            run.save()
            run.saves.finish()
            _log.warning("step %d was saved before the error below ends the run", run.state.step)
    except Exception as second:  # noqa: BLE001 (the first error is the one to report)
        _log.warning("step %d could not be saved before the error below ends the run: %s", run.state.step, second)


def name_of(hook: Hook) -> str:
    """Returns the name of a hook in recipes."""
    return (hook.state_key or type(hook).__name__).rpartition(":")[2]


def _ends_run(error: Exception) -> bool:
    """Whether an error is not the fault of the hook that raised it: bad state, another job in the directory, a lost rank."""
    if isinstance(error, ForgeError):
        return error.exit_code not in _REFUSED
    return isinstance(error, (RollBack, torch.distributed.DistError)) or is_broken_connection(error)
