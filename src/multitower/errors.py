"""Every error multitower raises, as one small tree.

    MultitowerError
    ├── DeviceError   (ValueError)    a device specification that this machine cannot meet
    ├── ModelError    (ValueError)    a model that cannot be trained on towers as it is
    ├── BatchError    (ValueError)    a batch that cannot be split over towers
    ├── JobError      (ValueError)    a job, its parameters or its run directory
    ├── ScheduleError (ValueError)    a learning rate that cannot be made or scaled as asked
    ├── TraceError    (RuntimeError)  a step that cannot be traced
    ├── CheckpointError (ValueError)  a checkpoint that is not there, is damaged or is of another model
    ├── StoppedError  (RuntimeError)  training that a signal stopped, after its state was saved
    └── TowerError    (RuntimeError)  a step that failed inside a tower

Each message says what was received, what was expected and how to fix it, on one line. Errors of Keras and
TensorFlow that name the cause themselves are passed on unchanged.
"""


class MultitowerError(Exception):
    """Base class of all errors of multitower; catch it to catch them all."""


class DeviceError(MultitowerError, ValueError):
    """Devices were asked for that do not exist or can no longer be made."""


class ModelError(MultitowerError, ValueError):
    """The model cannot be trained on towers as it is (not compiled, built under a strategy, …)."""


class BatchError(MultitowerError, ValueError):
    """A batch cannot be split over towers (no rows, arrays of different lengths, …)."""


class JobError(MultitowerError, ValueError):
    """A job file, a job parameter or a run directory is unusable."""


class ScheduleError(MultitowerError, ValueError):
    """A learning rate cannot be made or scaled as asked."""


class TraceError(MultitowerError, RuntimeError):
    """A step cannot be traced (it runs no graph, something else is profiling, …)."""


class CheckpointError(MultitowerError, ValueError):
    """A checkpoint or its directory is unusable: none there, damaged, of another model, locked by another run."""


class StoppedError(MultitowerError, RuntimeError):
    """Training ended early because a signal asked for it, and its state was saved; it is no failure."""


class TowerError(MultitowerError, RuntimeError):
    """A step failed inside a tower; the message carries the tower's own error."""
