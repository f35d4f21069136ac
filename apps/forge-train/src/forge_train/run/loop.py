"""The training loop, read from top to bottom. What happens around a step is a hook; what happens in one is `Step`."""

from forge_train.run.run import Run


def fit(run: Run) -> str:
    """Trains until the run is finished or asked to stop; returns why it ended.

    Raises:
        TrainingError: too many steps had a loss or gradient that is not finite, or the state after the last one is not.
        Superseded: another job has started in the run's directory.
    """
    for hook in run.hooks:
        hook.start(run)
    for batches, cursor in run.data.from_cursor(run.state.cursor):
        if run.stop.reason(run.state):
            break
        run.begin_step()
        for hook in run.hooks:
            hook.before_step(run)
        result = run.step(batches, stop=run.stop.wanted())
        for hook in run.hooks:
            hook.before_update(run, result)
        run.update(result)
        run.state.advance(cursor, run.tokens_per_step)
        run.stop.after(result)
        run.health.after(run.state.step, result)
        for hook in run.hooks:
            hook.after_step(run, result)
    run.stop.check()
    run.check()
    for hook in run.hooks:
        hook.finish(run)
    return run.stop.reason(run.state) or "data exhausted"
