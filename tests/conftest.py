"""Options of the suite: on which device its tensors live."""

import gc
import os

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption(
        "--device", default="cpu", choices=["cpu", "cuda"], help="where tests make tensors that name no device"
    )


def pytest_configure(config):
    torch.set_num_threads(1)  # workers share the cores; small tensors gain nothing from more
    if config.getoption("--device") == "cuda":
        torch.set_default_device("cuda")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep what is collected out of the garbage collector: a full pass over it takes a third of a second."""
    gc.disable()
    try:
        result = yield
    finally:
        gc.enable()
    gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and "POSTERITY_DATA" in str(report.longrepr) and os.environ.get("POSTERITY_REQUIRE_DATA"):
        report.outcome = "failed"  # a run that must see all data has not
    return report


def pytest_collection_modifyitems(config, items):
    on_cuda, there = config.getoption("--device") == "cuda", torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("cuda") and not there:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("cpu") and on_cuda:
            item.add_marker(pytest.mark.skip(reason="says what happens on the CPU"))
    if on_cuda:  # tensors of another device print its name; a skipped example without a line number stops the run
        examples = [item for item in items if isinstance(item, pytest.DoctestItem)]
        config.hook.pytest_deselected(items=examples)
        items[:] = [item for item in items if not isinstance(item, pytest.DoctestItem)]
