"""Every error that a user can meet. Each names the thing, the numbers and the next step."""


class ShardwrightError(Exception):
    """Base of all errors raised on purpose by this project."""


class InputError(ShardwrightError, ValueError):
    """An argument of the public surface is wrong (``gpus=0``, an unknown layout key, no example inputs)."""


class CaptureError(ShardwrightError):
    """The model cannot be captured as a graph; names the user's own module and source line."""


class BatchError(ShardwrightError, ValueError):
    """The batch does not divide over data ranks and micro-batches, or an op mixes it; names both numbers."""


class InfeasibleError(ShardwrightError):
    """No plan fits into the memory limit (or the forced layout has no legal strategy)."""


class PlanError(ShardwrightError, ValueError):
    """A plan file is invalid, or does not belong to this model, world size, torch or shapes; names both values."""


class ReshardError(ShardwrightError):
    """A conversion between two shardings that does not exist."""


class WorkerError(ShardwrightError, RuntimeError):
    """A worker process failed or outlived its time limit; names rank, stage and what it last did."""


class ReplicatedOpWarning(UserWarning):
    """An op without a rule runs whole on every rank; names op, cost and layer."""


class PlanWarning(UserWarning):
    """Something about a plan that the user should know once (foreign hardware, predictions that do not hold)."""
