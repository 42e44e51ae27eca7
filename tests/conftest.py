"""What holds for every test: no network, few threads, and nothing is skipped without anybody
noticing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DRAFTTRAIN_CONF_DIR", "DRAFTTRAIN_TRACEBACK"):
    os.environ.pop(_name, None)

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", min(4, os.cpu_count() or 1))))


@pytest.fixture(scope="session")
def target() -> Any:
    """A tiny target that can chat, with answers long enough to draft in; files that need another
    have their own."""
    from tests.helpers import tiny_chat_target

    return tiny_chat_target(stop_bias=1.0)


@pytest.fixture(scope="session", autouse=True)
def _answers_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, Any, Any]:
    """Answers of tiny targets do not go into the user's cache folder."""
    from drafttrain.target import answers

    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "cache_dir", lambda: folder)
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no worker ends with one by itself: those that start
    processes, then those of most tests."""
    tests = Counter(item.path for item in items)
    starting = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: (item.path not in starting, -tests[item.path]))


ALLOWED_SKIPS = ("needs an accelerator",)
"""Reasons that may skip a test: what the machine lacks, never what could be installed."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, Any, Any]:
    """A skip for any other reason is a failure: a check that did not run is not a check that
    passed."""
    report = yield
    return _refuse_skip(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    return _refuse_skip(report)


def _refuse_skip(report: Any) -> Any:
    if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
        path, line, reason = report.longrepr
        if not reason.removeprefix("Skipped: ").startswith(ALLOWED_SKIPS):
            report.outcome = "failed"
            report.longrepr = (
                f"{path}:{line}: skipped ({reason}); allowed reasons start with {ALLOWED_SKIPS}"
            )
    return report
