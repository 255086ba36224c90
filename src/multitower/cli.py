"""The command line: `multitower train | verify | measure | trace | trials | env`. Thin: arguments, a call, printing.

Exit codes: 0; 1 where training failed; 2 where an argument, a job or a device is wrong; 75 where SIGTERM or Ctrl-C
stopped training and a checkpoint was saved; 130 after Ctrl-C elsewhere; those of verify: 0 equal, 1 not equal, 2 could
not run; of trials: see its help. An error is one line on stderr. TensorFlow is imported inside the commands, so that
`--help` is immediate.
"""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from . import __version__
from .console import env_rows, print_table, train_rows
from .start import start_tensorflow

_LINE = 600  # characters of an error's message; TensorFlow's run to pages


class _CommandError(Exception):
    """An error as one line and an exit code; `main` prints the one and returns the other."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class _Commands(click.Group):
    """A group that turns every error of its commands into a `_CommandError`."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if ctx.meta.get("multitower.debug"):
                traceback.print_exc()
            raise _command_error(error, 2 if ctx.invoked_subcommand == "verify" else 1) from error


def _command_error(error: BaseException, failure: int) -> _CommandError:
    from .errors import MultitowerError, StoppedError, TowerError
    from .stopping import EXIT_CODE

    message = " ".join(str(error).split())
    message = message if len(message) <= _LINE else f"{message[:_LINE]} …"
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", []) if "\n" not in note)
    if isinstance(error, KeyboardInterrupt):
        return _CommandError(f"interrupted{notes}", 130)
    if isinstance(error, StoppedError):
        return _CommandError(f"{message}{notes}", EXIT_CODE)
    if isinstance(error, MultitowerError) and not isinstance(error, TowerError):
        return _CommandError(f"{message}{notes}", 2)
    return _CommandError(f"{type(error).__name__}: {message}{notes} (--debug shows the traceback)", failure)


def _remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta["multitower.debug"] = True


_debug = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_remember_debug, help="Show the traceback of an error."
)
_devices = click.option(
    "--devices",
    metavar="SPEC",
    help='Devices of the towers: all, 4, "gpu:0,2" or "cpu:4"; by default all GPUs, or one CPU.',
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout.")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="multitower %(version)s")
@_debug
def cli() -> None:
    """Train a TensorFlow / Keras model on all devices of this machine, with the results of one device."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors only


_batch_size = click.option("--batch-size", type=click.IntRange(min=1), metavar="B", help="Rows of the global batch.")
_settings = click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of the job; can be repeated."
)


def _placement(default: str):
    text = 'Where variables live: replicated, shared, "shared:cpu:0" for a device, or auto.'
    return click.option("--placement", default=default, show_default=True, metavar="P", help=text)


_reduce = click.option(
    "--reduce", default="auto", show_default=True, metavar="R", help="How towers meet: host, gather, ring or nccl."
)
_seed = click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of random numbers."
)


@cli.command()
@click.argument("job", required=False)
@_devices
@click.option("--epochs", type=click.IntRange(min=1), metavar="N", help="Passes over the training data.")
@_batch_size
@_settings
@click.option("--run-dir", metavar="DIR", help="New or empty directory to write to; by default runs/JOB-DATE-TIME.")
@click.option(
    "--scale-lr",
    type=click.Choice(["none", "linear", "sqrt"]),
    help="How the learning rate follows the global batch: times B/B₀ or its root, B₀ being the job's own rows; none.",
)
@_placement("auto")
@_reduce
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Of random numbers; by default 0.")
@click.option("--resume", metavar="DIR", help="Go on with the run in DIR, on any devices, from its newest checkpoint.")
@click.option("--allow-older", is_flag=True, help="With --resume: use an older checkpoint if the newest is unusable.")
@click.option(
    "--save-epochs", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Epochs a checkpoint."
)
@click.option("--save-steps", type=click.IntRange(min=1), metavar="N", help="Steps a checkpoint, within epochs too.")
@click.option(
    "--keep", type=click.IntRange(min=1), default=3, show_default=True, metavar="N", help="Checkpoints that are kept."
)
@click.option(
    "--evaluate-on", type=click.Choice(["all", "one"]), default="all", show_default=True, help="Devices of validation."
)
@click.option("--gradient-norms", is_flag=True, help="Log norms of gradients, of each tower too, and the noise scale.")
@_json
@_debug
def train(
    job,
    devices,
    epochs,
    batch_size,
    settings,
    run_dir,
    scale_lr,
    placement,
    reduce,
    seed,
    resume,
    allow_older,
    save_epochs,
    save_steps,
    keep,
    evaluate_on,
    gradient_norms,
    as_json,
) -> None:
    """Train JOB on towers, report, and save the model.

    JOB is a built-in job (digits, the default) or a Python file with build_model(**params), which returns a compiled
    keras.Model, and load_data(**params), which returns (train, validation): tf.data.Datasets of batches or tuples of
    arrays (x, y); make_callbacks(**params), which returns Keras callbacks, may be there too.

    SIGTERM or Ctrl-C finishes the step, saves a checkpoint and ends with exit code 75; a second one ends at once.

    In the report of --json, accuracy and loss are those of the validation data; metrics has all of both.
    """
    from .job import find_job
    from .parameters import parse_params

    if job or not resume:
        find_job(job or "digits")  # before TensorFlow is imported: a wrong name is told at once
    params = parse_params(settings)
    start_tensorflow()
    from .train import Saving, run

    report = run(
        job,
        devices,
        epochs,
        batch_size,
        params,
        run_dir,
        seed,
        scale_lr=scale_lr,
        placement=placement,
        reduce=reduce,
        resume=resume,
        allow_older=allow_older,
        saving=Saving(save_epochs, save_steps, keep),
        evaluate_on=evaluate_on,
        gradient_norms=gradient_norms,
    )
    print_table("multitower train", train_rows(report))
    if as_json:
        click.echo(report.as_json())


@cli.command()
@click.argument("job", default="digits")
@_devices
@click.option(
    "--steps", type=click.IntRange(min=3), default=5, show_default=True, metavar="N", help="Updates to compare."
)
@_batch_size
@_settings
@_placement("replicated")
@_reduce
@_seed
@_json
@_debug
def verify(job, devices, steps, batch_size, settings, placement, reduce, seed, as_json) -> int:
    """Train copies of JOB on one device and on towers, and compare after every step.

    From the same weights, on even, uneven and smaller-than-N batches of its data: every weight, optimizer slot and
    metric and the loss have to be equal up to what rounding does on one device, and the copies on all towers to the
    bit. JOB is as in `multitower train`.

    Exit code 0: equal; 1: not equal; 2: could not run or could not be compared.
    """
    from .job import find_job
    from .parameters import parse_params

    find_job(job)
    params = parse_params(settings)
    start_tensorflow()
    from .verification.job import verify_job

    report = verify_job(job, devices, steps, batch_size, params, seed, placement, reduce)
    print_table("multitower verify", report.summary())
    head, rows = report.table()
    print_table("", rows, head)
    if as_json:
        click.echo(report.as_json())
    return report.exit_code


def _listed(ctx: click.Context, _: click.Parameter, value: str) -> list[str]:
    return [part.strip() for part in value.split(",")]


@cli.command()
@click.argument("job", default="digits")
@click.option(
    "--devices",
    default="1,2,4",
    show_default=True,
    metavar="N,…",
    help="Numbers of devices, GPUs where there are any; cpu:1,2,4 for logical CPU devices.",
)
@click.option(
    "--placement", default="auto", show_default=True, metavar="NAME,…", callback=_listed, help="Placements of Trainer."
)
@click.option(
    "--reduce", default="auto", show_default=True, metavar="NAME,…", callback=_listed, help="Ways to reduce of Trainer."
)
@click.option("--batch-size", type=click.IntRange(min=1), metavar="B", help="Rows of the batch on one device.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Of each measurement, without start and first step.",
)
@click.option("--plot", "plot_file", metavar="FILE", help="Draw the result as a PNG; needs matplotlib.")
@_settings
@_seed
@_json
@_debug
def measure(job, devices, placement, reduce, batch_size, seconds, plot_file, settings, seed, as_json) -> None:
    """Measure what more devices give for JOB, and say whether they pay.

    The same global batch divided over N devices (strong scaling) and one N times as large (weak), against one device
    and against N towers that never meet; N trainings side by side; and the training without its input. Each
    configuration in a process of its own; one that fails is reported, and the others go on. JOB is as in
    `multitower train`.
    """
    from .parameters import parse_params
    from .scaling.plot import check_plot, plot
    from .scaling.study import measure

    if plot_file:
        check_plot(plot_file)
    scaling = measure(
        job,
        devices,
        placement=placement,
        reduce=reduce,
        batch_size=batch_size,
        params=parse_params(settings),
        seed=seed,
        seconds=seconds,
        progress=lambda text: click.echo(f"measuring {text}", err=True) if sys.stderr.isatty() else None,
    )
    print_table("multitower measure", scaling.summary())
    head, rows = scaling.table()
    print_table("", rows, head)
    if plot_file:
        plot(scaling, plot_file)
    if as_json:
        click.echo(scaling.as_json())


class _WithCommand(click.Command):
    """A command that takes the words after `--` as a command of the user's, apart from its own arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta["multitower.command"], args = args[at + 1 :], args[:at]
        return super().parse_args(ctx, args)


@cli.command(cls=_WithCommand, options_metavar="[OPTIONS]", epilog="Instead of JOB: -- COMMAND … {NAME} …")
@click.argument("job", required=False)
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUES", help="lr=0.1,0.01 or lr=log:1e-4..1e-1; can be repeated."
)
@click.option("--devices", metavar="SPEC", help='One trial on each: all, 4, "gpu:0,2" or "cpu:4"; by default all GPUs.')
@click.option(
    "--random", type=click.IntRange(min=1), metavar="N", help="Draw N settings; by default every combination."
)
@click.option(
    "--repeat", type=click.IntRange(min=1), default=1, metavar="K", help="Trials of each setting, of K seeds."
)
@click.option("--metric", metavar="NAME", help="Compared by; val_loss by default.")
@click.option("--mode", type=click.Choice(["min", "max"]), help="Which metric is best, where its name does not tell.")
@click.option("--halving", type=click.IntRange(min=2), metavar="ETA", help="Successive halving: one in ETA goes on.")
@click.option("--early-stop", is_flag=True, help="End trials that are worse than the median of the others.")
@click.option("--min-steps", type=click.IntRange(min=1), default=1, metavar="N", help="Epochs before a trial is ended.")
@click.option("--epochs", type=click.IntRange(min=1), metavar="N", help="Passes of a job over its training data.")
@_batch_size
@_seed
@click.option("--per-device", type=click.IntRange(min=1), default=1, metavar="N", help="Trials at once on each device.")
@click.option("--share", is_flag=True, help="Use GPUs that others use, too.")
@click.option(
    "--hang-seconds", type=click.FloatRange(min=0, min_open=True), default=3600.0, show_default=True, metavar="S",
    help="A trial that writes nothing for so long has failed.",
)  # fmt: skip
@click.option("--run-dir", metavar="DIR", help="Directory of the study; by default runs/trials-JOB-DATE-TIME.")
@click.option("--resume", is_flag=True, help="Go on with the study in --run-dir; all else may be left out.")
@click.option("--retry-failed", is_flag=True, help="With --resume: start failed trials again.")
@click.option("--ray", metavar="ADDRESS", help="Run on a Ray cluster: auto, HOST:PORT or ray://HOST:PORT.")
@_json
@_debug
@click.pass_context
def trials(ctx, job, settings, as_json, **options) -> int:
    """Search parameters: a trial for each setting, one per device at a time, each in a process of its own.

    JOB is as in `multitower train`. A command after -- has {NAME} where the value of a parameter is to stand, and
    prints its metric as a line of JSON: {"val_loss": 0.2}.

    Ctrl-C once: running trials end, no other is started; twice: running trials are ended. Exit code 0: every trial is
    done or was ended early; 1: some failed; 2: could not run; 3 and 130: Ctrl-C once and twice. --resume goes on.
    """
    from .trials import run
    from .trials.live import watch_terminal
    from .trials.space import parse_space

    command = ctx.meta.get("multitower.command")
    if command is None and job is None and not options["resume"]:
        job = "digits"
    if command is not None and (job or not command):
        raise click.UsageError("give one of JOB and, after --, a command" if job else "there is no command after --")
    watch = watch_terminal(sys.stdout, options["metric"], options["epochs"])
    report = run(command or job, parse_space(settings), watch=watch, **options)
    head, rows = report.table()
    print_table("multitower trials", rows, head)
    click.echo(f"files: {report.directory}, results: {report.database}, picture: {report.picture or 'none'}")
    if as_json:
        click.echo(report.as_json())
    return report.exit_code


@cli.command()
@click.argument("job", default="digits")
@_devices
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, metavar="N", help="Steps to time.")
@_batch_size
@_settings
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    help="New or empty directory to write to; by default traces/JOB-DATE-TIME.",
)
@click.option(
    "--expect-colocated", is_flag=True, help="Exit 1 if a backward operation is not on its forward operation's device."
)
@_seed
@_json
@_debug
def trace(job, devices, steps, batch_size, settings, output, expect_colocated, seed, as_json) -> int:
    """Trace training steps of JOB: what runs where, when, and where the time goes.

    Writes trace.json.gz (opens in https://ui.perfetto.dev and chrome://tracing), report.html (a picture of the lanes
    and the tables) and timeline.json. JOB is as in `multitower train`; the trained model is not kept.

    Exit code 0; with --expect-colocated 1 if there is a backward operation that does not run on the device of its
    forward operation; 2 where an argument, a job or a device is wrong.
    """
    from .job import find_job
    from .parameters import parse_params

    find_job(job)
    params = parse_params(settings)
    start_tensorflow()
    from .timeline.job import trace_job
    from .timeline.report import tables

    traced = trace_job(job, devices, steps, batch_size, params, output, seed)
    print_table("multitower trace", [*traced.timeline.summary(), *traced.files.items()])
    for head, rows in tables(traced.timeline):
        print_table("", rows, head)
    if as_json:
        click.echo(traced.as_json())
    return 1 if expect_colocated and traced.timeline.misplaced else 0


@cli.command()
@_devices
@_json
@_debug
def env(devices, as_json) -> None:
    """Show devices, versions, and which collectives will be used and why."""
    start_tensorflow()
    from .collectives import choose_reduce
    from .device import describe
    from .placement import choose_placement

    found = describe(devices)
    names = [device["name"] for device in found["devices"]]
    for setting, (name, reason) in (("placement", choose_placement(names)), ("reduce", choose_reduce(names))):
        found[setting] = {"name": name, "reason": reason}
    print_table("multitower env", env_rows(found))
    if as_json:
        click.echo(json.dumps(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None for those of the process.

    Returns:
        The exit code.
    """
    try:
        result = cli.main(arguments, prog_name="multitower", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        message, exit_code = error.format_message(), error.exit_code
    except _CommandError as error:
        message, exit_code = str(error), error.exit_code
    except click.Abort:
        message, exit_code = "interrupted", 130
    sys.stdout.flush()
    click.echo(f"multitower: error: {message}", err=True)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
