"""A step, operation by operation: `multitower.trace`, `multitower.TraceSteps` and `multitower trace`.

tracing      the steps are run, or watched while they run
recording    TensorFlow's graphs and profile of them
graph        the operations of the graphs that ran, and their devices
categories   what each is for: input, forward, backward, reduction, …
pairs        backward operations that are not on the device of their forward operation
profile      operations with start and end
meetings     where towers wait for one another
intervals    sets of moments
breakdown    where the time of each device went
critical     the chain of operations a step took as long as
advice       one sentence
lanes        operations side by side
chrome       Chrome's trace format
picture      the lanes as a picture
page         the report as an HTML page
report       Timeline: all of it, to read, look at and save
job          multitower trace
"""

from .report import Timeline
from .tracing import TraceSteps, trace

__all__ = ["Timeline", "TraceSteps", "trace"]
