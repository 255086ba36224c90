"""What more devices give on this machine, measured on the user's own job, and what to do: `multitower.measure`.

study      the configurations, one process each, one after another; N processes at once for trials side by side
process    a configuration's process, from outside: start it, let it go on, hear its answers
child      one configuration: a Trainer that is timed
exchanges  how often towers meet in a step, and with how many bytes
advice     what to do, from the numbers alone
report     the result: a table, or JSON
plot       the result as a picture
"""

from .report import Scaling
from .study import measure

__all__ = ["Scaling", "measure"]
