"""Launchers of one name stay apart, in whatever order their files are loaded."""

import importlib.util

import pytest

from engine.kernels.launchers import LOAD, separate

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no wheel here")
NAME = "__omniloop_launcher"
SOURCE = """#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "NAME", NULL, -1, methods};
PyMODINIT_FUNC PyInit_NAME(void) { return PyModule_Create(&module); }
"""


def test_a_launcher_that_is_loaded_again_changes_no_other(tmp_path, monkeypatch):
    from triton.runtime import build

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, LOAD, getattr(build, LOAD))  # put back at the end
    separate(build)
    separate(build)

    def made(number):
        return build.compile_module_from_src(SOURCE.replace("NUMBER", str(number)).replace("NAME", NAME), NAME)

    one, two, again = made(1), made(2), made(1)
    assert [each.launch() for each in (one, two, again)] == [1, 2, 1]
