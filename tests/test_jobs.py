"""Jobs: found, loaded, checked; each mistake is one clear JobError; the built-in digits are what they say."""

import keras
import numpy as np
import pytest

from multitower.errors import JobError
from multitower.job import (
    builtin_jobs,
    check_job_params,
    find_job,
    load_job,
    make_callbacks,
    make_data,
    make_model,
    with_batch_size,
)
from multitower.jobs import digits
from multitower.parameters import parse_params

MODEL = """
import keras

def build_model(lr=0.1):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(lr), "mse")
    return model
"""
DATA = """
import numpy as np

def load_data(rows=10):
    x = np.ones((rows, 3), "float32")
    return (x, x[:, :1]), (x, x[:, :1])
"""


@pytest.fixture
def job_file(tmp_path):
    """A function that writes a job file and returns its path as text."""

    def write(*parts, name="job.py"):
        (tmp_path / name).write_text("\n".join(parts))
        return str(tmp_path / name)

    return write


def error_of(function, *arguments):
    """The message of the JobError that a call raises: one line."""
    with pytest.raises(JobError) as raised:
        function(*arguments)
    message = str(raised.value)
    assert "\n" not in message
    return message


# Finding and loading


def test_builtin_jobs_go_by_name():
    assert "digits" in builtin_jobs()
    job = load_job("digits")
    assert (job.name, job.epochs, job.batch_size) == ("digits", digits.EPOCHS, digits.BATCH_SIZE)
    assert job.build_model is digits.build_model
    assert job.path.name == "digits.py"


def test_a_job_file_goes_by_path(job_file):
    job = load_job(job_file(MODEL, DATA, "EPOCHS = 7\nBATCH_SIZE = 5\n", name="mine.py"))
    assert (job.name, job.epochs, job.batch_size) == ("mine", 7, 5)


def test_a_job_without_constants_has_the_defaults_of_keras(job_file):
    job = load_job(job_file(MODEL, DATA))
    assert (job.epochs, job.batch_size) == (1, 32)


def test_two_files_of_one_name_do_not_meet(job_file, tmp_path):
    first = load_job(job_file(MODEL, DATA, "EPOCHS = 1"))
    (tmp_path / "other").mkdir()
    second = load_job(job_file(MODEL, DATA, "EPOCHS = 2", name="other/job.py"))
    assert (first.epochs, second.epochs) == (1, 2)
    assert first.build_model.__module__ != second.build_model.__module__


def test_a_job_file_can_import_a_module_beside_it(job_file):
    job_file(DATA, name="rows_of_a_job_in_a_test.py")
    assert (
        load_job(job_file("from rows_of_a_job_in_a_test import load_data", MODEL)).load_data(rows=2)[0][0].shape[0] == 2
    )


def test_unknown_name():
    message = error_of(find_job, "digit")
    assert "no job 'digit'" in message
    assert "digits" in message
    assert message.endswith("did you mean 'digits'?")


def test_missing_file_suggests_the_file_beside_it(job_file):
    path = job_file(MODEL, DATA)
    wrong = path.replace("job.py", "jbo.py")
    assert error_of(find_job, wrong).endswith(f"did you mean {path!r}?")
    assert f"no job file {wrong!r}" in error_of(find_job, wrong)


def test_a_folder_is_no_job(tmp_path):
    assert "path of a Python file" in error_of(find_job, str(tmp_path))


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        (MODEL, "load_data"),
        (DATA, "build_model"),
        ("", "build_model and no load_data"),
        (MODEL + "load_data = 3", "load_data"),
    ],
)
def test_file_without_the_functions(job_file, source, missing):
    assert f"has no function {missing};" in error_of(load_job, job_file(source))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("x = 1\nraise KeyError('width')", "KeyError: 'width'"),
        ("x = 1\nimport no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit('bye')", "SystemExit: bye"),
        ("import json\njson.loads('{')", "JSONDecodeError: Expecting property name"),
    ],
)
def test_file_that_raises_on_import_names_its_own_error_and_line(job_file, source, told):
    path = job_file(source)
    message = error_of(load_job, path)
    assert told in message
    assert message.endswith(f"({path}:2)")


@pytest.mark.parametrize("value", ["0", "'8'", "True", "2.5"])
def test_constants_are_counts(job_file, value):
    message = error_of(load_job, job_file(MODEL, DATA, f"BATCH_SIZE = {value}"))
    assert f"BATCH_SIZE = {value}; expected an integer of at least 1" in message


def test_rows_of_a_tower_make_the_global_batch(job_file):
    job = load_job(job_file(MODEL, DATA, "BATCH_SIZE_PER_TOWER = 5"))
    assert [job.global_batch(towers) for towers in (1, 3)] == [5, 15]
    assert [load_job(job_file(MODEL, DATA, "BATCH_SIZE = 5")).global_batch(towers) for towers in (1, 3)] == [5, 5]
    message = error_of(load_job, job_file(MODEL, DATA, "BATCH_SIZE_PER_TOWER = 5\nBATCH_SIZE = 6"))
    assert "has BATCH_SIZE and BATCH_SIZE_PER_TOWER; expected one of them" in message
    assert "BATCH_SIZE_PER_TOWER = 0; expected an integer" in error_of(
        load_job, job_file(MODEL, DATA, "BATCH_SIZE_PER_TOWER = 0")
    )


def test_functions_that_ask_for_the_batch_size_get_what_is_said_of_it(job_file):
    """The command line before the user's parameters before the job; a job that says nothing keeps its own default."""
    silent, of_all, of_one = (
        load_job(job_file(MODEL, DATA, constant)) for constant in ("", "BATCH_SIZE = 5", "BATCH_SIZE_PER_TOWER = 5")
    )
    assert with_batch_size(silent, {"lr": 1}, 3, None) == {"lr": 1}
    assert with_batch_size(silent, {}, 3, 7) == {"batch_size": 7}
    assert with_batch_size(of_all, {}, 3, None) == {"batch_size": 5}
    assert with_batch_size(of_one, {}, 3, None) == {"batch_size": 15}
    assert with_batch_size(of_one, {"batch_size": 9}, 3, None) == {"batch_size": 9}
    assert with_batch_size(of_one, {"batch_size": 9}, 3, 7) == {"batch_size": 7}


# Callbacks


def test_callbacks_of_a_job_are_made_with_its_parameters(job_file):
    callbacks = "def make_callbacks(patience=1):\n    return [keras.callbacks.EarlyStopping(patience=patience)]"
    job = load_job(job_file(MODEL, DATA, callbacks))
    check_job_params(job, {"patience": 3, "lr": 0.1})
    assert [c.patience for c in make_callbacks(job, {"patience": 3, "lr": 0.1})] == [3]
    assert make_callbacks(load_job(job_file(MODEL, DATA)), {}) == []
    assert "build_model and load_data and make_callbacks accept: lr, rows, patience" in error_of(
        check_job_params, job, {"x": 1}
    )


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("make_callbacks = 3", "make_callbacks = 3; expected a function"),
        (
            "def make_callbacks():\n    return None",
            "make_callbacks returned NoneType; expected a list of keras.callbacks",
        ),
        ("def make_callbacks():\n    return [print]", "make_callbacks returned a list of 1; expected a list of keras"),
        ("def make_callbacks():\n    raise ValueError('no')", "make_callbacks raised ValueError: no ("),
    ],
)
def test_callbacks_that_are_none(job_file, source, told):
    path = job_file(MODEL, DATA, source)
    assert told in error_of(lambda: make_callbacks(load_job(path), {}))


# Parameters


def test_values_are_python_literals_else_text():
    settings = ["a=1", "b=1e-3", "c=True", "d=None", "e='x y'", "f=(1, 2)", "g=relu", "h=", "i=x=y", "j=[", "k=-2"]
    assert list(parse_params(settings).values()) == [1, 1e-3, True, None, "x y", (1, 2), "relu", "", "x=y", "[", -2]


@pytest.mark.parametrize("setting", ["lr", "=3", "a-b=3", ""])
def test_setting_without_a_name(setting):
    assert f"parameter {setting!r}; expected NAME=VALUE" in error_of(parse_params, [setting])


def test_setting_given_twice():
    assert "parameter lr is given twice" in error_of(parse_params, ["lr=1", "lr=2"])


def test_each_function_gets_the_parameters_it_accepts(job_file):
    job = load_job(job_file(MODEL, DATA))
    params = {"lr": 0.5, "rows": 4}
    check_job_params(job, params)
    assert float(make_model(job, params).optimizer.learning_rate.numpy()) == 0.5
    assert make_data(job, params)[0][0].shape == (4, 3)


def test_unknown_parameter_lists_the_accepted_ones(job_file):
    message = error_of(check_job_params, load_job(job_file(MODEL, DATA)), {"row": 3})
    assert "job job: no parameter 'row'; build_model and load_data accept: lr, rows" in message
    assert message.endswith("did you mean 'rows'?")


def test_kwargs_accept_every_parameter(job_file):
    job = load_job(job_file(MODEL, "def load_data(**params):\n    return params, params"))
    check_job_params(job, {"anything": 1})
    make_model(job, {"anything": 1})


def test_required_parameter_that_is_not_given(job_file):
    job = load_job(job_file(MODEL, "def load_data(folder):\n    return folder, folder"))
    assert "load_data requires parameter 'folder'; give --set folder=VALUE" in error_of(check_job_params, job, {})


# What the functions return


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return None", "build_model returned NoneType; expected a compiled keras.Model"),
        ("return keras.layers.Dense(1)", "build_model returned Dense; expected a compiled keras.Model"),
        ("return keras.Sequential()", "build_model returned a keras.Model that is not compiled; call model.compile"),
    ],
)
def test_build_model_that_returns_no_compiled_model(job_file, body, told):
    job = load_job(job_file(f"import keras\ndef build_model():\n    {body}", DATA))
    assert told in error_of(make_model, job, {})


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("None", "load_data returned NoneType; expected the pair (train, validation)"),
        ("(x,)", "load_data returned a tuple of 1; expected the pair (train, validation)"),
        ("(x, x)", "as train ndarray; expected a tf.data.Dataset of batches or a tuple of arrays (x, y)"),
        ("((x, x), (x,))", "as validation a tuple of 1; expected a tf.data.Dataset"),
        ("((x, x[1:]), (x, x))", "as train arrays of different lengths [4, 3]; expected one label for each row"),
        ("((x, x), (x[:0], x[:0]))", "as validation arrays without rows; expected at least one row"),
        ("((x, 3), (x, x))", "as train a tuple with something that is not an array"),
        ("(batches.repeat(), batches)", "as train a dataset without end; bound it, with .take(steps)"),
        ("(batches, batches.take(0))", "as validation a dataset without batches; expected at least one row"),
    ],
)
def test_load_data_that_returns_no_two_data_sets(job_file, result, told):
    source = f"""
import numpy as np, tensorflow as tf
def load_data():
    x = np.ones((4, 3))
    batches = tf.data.Dataset.from_tensor_slices((x, x)).batch(2)
    return {result}
"""
    assert told in error_of(make_data, load_job(job_file(source, MODEL)), {})


def test_dicts_lists_and_sample_weights_are_data(job_file):
    source = """
import numpy as np
def load_data():
    x = np.ones((4, 3))
    return [{"a": x, "b": [x]}, {"c": x}, x[:, 0]], (x, None)
"""
    train, validation = make_data(load_job(job_file(source, MODEL)), {})
    assert len(train) == 3
    assert validation[1] is None


@pytest.mark.parametrize("function", ["build_model", "load_data"])
def test_error_inside_a_function_is_told_with_its_place(job_file, function):
    broken = f"def {function}():\n    raise ValueError('bad\\nwidth')"
    path = job_file(broken, DATA if function == "build_model" else MODEL)
    message = error_of(make_model if function == "build_model" else make_data, load_job(path), {})
    assert message == f"job job: {function} raised ValueError: bad width ({path}:2)"


# The built-in job


def test_digits_are_split_by_class_and_always_alike():
    (x, y), (x_held, y_held) = digits.load_data()
    assert (x.shape, x_held.shape) == ((1437, 8, 8, 1), (360, 8, 8, 1))
    assert (x.dtype, y.dtype, float(x.max())) == ("float32", "int32", 1.0)
    assert np.ptp(np.bincount(y_held)) <= 4  # 33 to 37 images of every digit
    np.testing.assert_array_equal(y_held, digits.load_data()[1][1])
    assert not np.array_equal(y_held, digits.load_data(seed=1)[1][1])
    rows = {row.tobytes() for row in x}
    assert sum(row.tobytes() in rows for row in x_held) == 0


def test_digits_model_follows_its_parameters_and_seed():
    model = digits.build_model(lr=0.5, width=4, dropout=0.1, seed=3)
    layers = [type(layer).__name__ for layer in model.layers]
    assert layers.count("BatchNormalization") == 2
    assert "Dropout" in layers
    assert float(model.optimizer.learning_rate.numpy()) == 0.5
    assert model.layers[0].filters == 4
    again = digits.build_model(width=4, seed=3)
    np.testing.assert_array_equal(model.get_weights()[0], again.get_weights()[0])
    keras.utils.set_random_seed(3)
    np.testing.assert_array_equal(model.get_weights()[0], digits.build_model(width=4).get_weights()[0])
