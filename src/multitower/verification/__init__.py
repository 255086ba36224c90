"""N towers against one device, on the user's own model: `multitower.verify` and `multitower verify`.

verifier     the runs, side by side, and the report
job          multitower verify: the model and the first batch of a job
row_batches  even, uneven and small batches of chosen rows
model_copy   copies of the user's model, random layers silenced
inventory    every variable that a step can change
twins        a copy of a training that is set to a start and watched
rounding     how far rounding alone moves a training: the bound
comparison   differences after every step, and what to make of them
experiment   single steps that show what towers make of the gradient
forward      layers whose output for a row depends on other rows
diagnosis    the likely reason
report       the result: a table, or JSON
"""

from .verifier import verify, verify_step

__all__ = ["verify", "verify_step"]
