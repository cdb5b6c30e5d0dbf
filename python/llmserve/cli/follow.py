"""A node that has no rank 0: it computes for the one that has, and takes no requests."""

import logging
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

from llmserve import _core
from llmserve.checkpoint.model_files import find_checkpoint, text_source
from llmserve.errors import DeviceError, InvalidArgument
from llmserve.llm_base import config_text
from llmserve.options.engine_options import as_max_model_len, read_options
from llmserve.options.speculative_config import with_model_found

_log = logging.getLogger(__name__)


def make_node(model: str, given: Mapping[str, Any]) -> _core.NodeFollower:
    """One of the model and the options of node 0. Raises what LLM raises on arguments."""
    options = read_options("serve", model, given)
    options = replace(
        options,
        speculative_config=with_model_found(  # type: ignore[arg-type]  # checked there
            options.speculative_config, options.download_dir
        ),
    )
    length = options.max_model_len
    if length is not None and as_max_model_len("max_model_len", length) == -1:
        raise InvalidArgument(
            "max_model_len must be a number on node_rank 1 and later: that of node 0, which its "
            "log names"
        )
    checkpoint = find_checkpoint(
        model, options.revision, options.download_dir, is_overridden=bool(options.hf_overrides)
    )
    opened = _core.Checkpoint(str(checkpoint), config_text(options, text_source(checkpoint)))
    return _core.NodeFollower(options.to_request(opened.path), opened)


def follow(model: str, given: Mapping[str, Any]) -> None:
    """Computes for node 0 until it ends, or SIGTERM or Ctrl-C. Raises InvalidArgument where node 0
    refuses, DeviceError where it is not found in time or a thread here hangs for good, and what
    loading raises."""
    node = make_node(model, given)
    _log.info("node %s of %s looks for node 0", given.get("node_rank"), given.get("nnodes"))
    failures: list[BaseException] = []

    def run() -> None:
        try:
            node.run()
        except BaseException as error:
            failures.append(error)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        threading.Thread(target=node.stop, daemon=True).start()  # it may wait for a lock

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    thread = threading.Thread(target=run, daemon=True)  # it may be left where it hangs
    thread.start()
    while thread.is_alive() and not node.left:
        thread.join(0.2)  # signals are handled between
    if node.left:
        raise DeviceError(f"node {given.get('node_rank')}: {node.left}")
    if failures:
        raise failures[0]
    _log.info("node 0 has ended, or this node was stopped, after %d steps", node.num_steps)
