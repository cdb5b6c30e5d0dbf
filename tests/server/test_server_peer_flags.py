"""Command lines for other servers: what they set here, what changes nothing, what is refused."""

from __future__ import annotations

import functools
import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
from llmserve import InvalidArgument, NotSupported, cli
from llmserve.cli import _parse, main
from llmserve.cli.serve import _flags
from llmserve.options.engine_options import read_options
from llmserve.options.peer_flags import peer_flags
from llmserve.server.options import TAKEN, Effective, resolve

LINES = (Path(__file__).parent / "vllm_serve_lines.txt").read_text(encoding="utf-8")
VLLM = [line for line in LINES.splitlines() if not line.startswith("#")]
# Of VLLM's lines those that are about features that are here; the others are refused by name.
NUM_TAKEN = 182


def read(*words: str) -> Effective:
    options = _parse(["serve", *words])
    effective = resolve(_flags(options), options.config)
    read_options("serve", "model", effective.engine).to_request("model")
    return effective


def refusal(words: list[str]) -> str:
    """What is said of it; "" where it is taken."""
    try:
        assert len(read(*words).models) == 1
    except NotSupported as refused:
        return str(refused)
    return ""


def test_lines_for_vllms_server_are_taken_or_refused_by_the_name_of_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("port: 8000\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_parser", functools.cache(cli._parser))  # it takes longer than a line
    monkeypatch.setenv("LLMSERVE_CLUSTER_KEY", "a key of the nodes, which the line has not")
    said = [refusal(shlex.split(line)[2:]) for line in VLLM]
    for line, message in zip(VLLM, said, strict=True):
        named = message.split("=")[0].removeprefix("serve: ").split(" ")[0].lstrip("-")
        spelled = line.replace("_", "-").replace("-tp ", "tensor-parallel-size ")
        spelled = spelled.replace("-pp ", "pipeline-parallel-size ")
        assert named.replace("_", "-") in spelled.replace("-dp ", "data-parallel-size "), message
    assert len(VLLM) == 229
    assert said.count("") >= NUM_TAKEN


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        (
            "-m model.gguf -c 4096 -t 4 -ngl 0 -np 8 --port 8080",
            {"model": ["model.gguf"], "max_model_len": 4096, "num_threads": 4, "device": "cpu"}
            | {"max_num_seqs": 8, "port": 8080},
        ),
        ("-hf org/x:Q4_K_M --ctx-size 0 -ngl 99 -fa on --jinja", {"model": ["org/x:Q4_K_M"]}),
        ("-m x -a a,b -n 128 -s 7 -b 512 -ub 256", {"served_model_name": ["a", "b"], "seed": 7}),
        ("-m x --ssl-key-file k --ssl-cert-file c -to 60", {"ssl_keyfile": "k"}),
        ("-m x -ctk f32 --reasoning-format none", {"kv_cache_dtype": "float32"}),
        ("--model-path x --context-length 8k --tp 1", {"max_model_len": 8000, "model": ["x"]}),
        (
            "--model-path x --mem-fraction-static 0.8 --max-running-requests 4 --page-size 32",
            {"gpu_memory_utilization": 0.8, "max_num_seqs": 4, "block_size": 32},
        ),
        ("x --chunked-prefill-size 256 --random-seed 3", {"max_num_batched_tokens": 256}),
        ("x --disable-radix-cache --disable-cuda-graph", {"enable_prefix_caching": False}),
        ("x --schedule-policy lpm --stream-interval 4", {"stream_flush_tokens": 4}),
        ("x --enforce-eager --no-enable-chunked-prefill", {"enforce_eager": True}),
        ("x --hf-overrides.rope_theta 5", {"hf_overrides": {"rope_theta": 5}}),
        ("x --max_num_seqs=4 --cudagraph-capture-sizes 1 2 4", {"max_num_seqs": 4}),
        ("--port 1 x", {"model": ["x"], "port": 1}),
        (
            "-hf org/x --temp 0.6 --top-k 20 --top-p 0.95 --min-p 0 -c 4096 --no-context-shift",
            {
                "override_generation_config": {"temperature": 0.6, "top_k": 20}
                | {"top_p": 0.95, "min_p": 0.0}
            },
        ),
        (
            'x --override-generation-config {"top_k":5} --temp 0.5',
            {"override_generation_config": {"top_k": 5, "temperature": 0.5}},
        ),
        (
            'x --reasoning-budget 0 --default-chat-template-kwargs {"a":1}',
            {"default_chat_template_kwargs": {"enable_thinking": False, "a": 1}},
        ),
        ('x --chat-template-kwargs {"a":1}', {"default_chat_template_kwargs": {"a": 1}}),
        (
            "x --any-model-name --unknown-fields ignore --leniency open_metrics",
            {"leniency": "any_model_name,unknown_fields,open_metrics"},
        ),
        ("x --unknown-fields refuse --closed-schemas", {"leniency": "closed_schemas"}),
        ("x --api-key a --api-key b", {"api_key": "a,b"}),
        (
            'x --rope-scaling {"rope_type":"yarn","factor":4.0} --hf-overrides {"a":1}',
            {"hf_overrides": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "a": 1}},
        ),
        ('x --override-pooler-config {"normalize":false}', {"pooler_config": {"normalize": False}}),
        ("x --enable-force-include-usage", {"leniency": "stream_usage"}),
        ("x --return-tokens-as-token-ids", {"leniency": "token_ids"}),
        ("x --uds /run/x.sock", {"host": "unix:/run/x.sock"}),
        (
            "x --shutdown-timeout 5 --sse-keep-alive-interval 3 --max-num-queued-tokens 9",
            {"drain_timeout": 5.0, "stream_keep_alive": 3.0, "max_waiting_tokens": 9},
        ),
        ("x --enable-per-request-metrics --linear-backend marlin", {"model": ["x"]}),
        ("x --pooling mean --embedding", {"pooler_config": {"pooling_type": "MEAN"}}),
        ("x --reasoning off", {"default_chat_template_kwargs": {"enable_thinking": False}}),
        (
            "x -rea on --reasoning-effort high",
            {"default_chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "high"}},
        ),
        ("x --cors-origins http://a,http://b", {"allowed_origins": "http://a,http://b"}),
        ("x --sse-ping-interval -1 --log-jsonl", {"stream_keep_alive": 0.0, "log_format": "json"}),
        (
            "x -md draft --draft-max 8 --draft-min 0",
            {"speculative_config": {"model": "draft", "num_speculative_tokens": 8}},
        ),
        ("x --spec-type ngram-simple", {"speculative_config": {"method": "ngram"}}),
        ("x --spec-type none --slots --tags a,b --backend-sampling", {"model": ["x"]}),
        (
            "x --speculative-model d --num-speculative-tokens 5",
            {"speculative_config": {"model": "d", "num_speculative_tokens": 5}},
        ),
    ],
)
def test_flags_of_others_set_what_is_here(line: str, settings: dict[str, Any]) -> None:
    flags = _flags(_parse(["serve", *line.split()]))
    assert {name: flags[name] for name in settings} == settings
    read(*line.split())


@pytest.mark.parametrize(
    ("line", "config"),
    [
        (
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path d "
            "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
            {"method": "eagle3", "model": "d", "num_speculative_tokens": 3},
        ),
        (
            "--speculative-algo EAGLE --speculative-draft-model-path d --speculative-num-steps 5 "
            "--speculative-eagle-topk 8 --speculative-num-draft-tokens 64",
            {"method": "eagle", "model": "d", "num_speculative_tokens": 5}
            | {"speculative_eagle_topk": 8, "speculative_num_draft_tokens": 63},
        ),
        (
            "--speculative-algorithm STANDALONE --speculative-draft-model-path d",
            {"method": "draft_model", "model": "d"},
        ),
        (
            "--speculative-algorithm EAGLE --speculative-num-steps 1 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 2",
            {"method": "mtp", "num_speculative_tokens": 1},
        ),
        (
            "--speculative-algorithm NEXTN --speculative-draft-model-path x",
            {"method": "mtp"},
        ),
        (
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 9 "
            "--speculative-ngram-min-match-window-size 2 --speculative-ngram-capacity 100",
            {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2},
        ),
        (
            "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 48",
            {"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 3}
            | {"num_speculative_tokens": 32},
        ),
        (
            "--spec-draft-model d --spec-draft-n-max 6 --spec-draft-n-min 2 "
            "--spec-draft-p-min 0.75 -ngld 99",
            {"model": "d", "num_speculative_tokens": 6},
        ),
    ],
)
def test_flags_of_guessing_are_read_together(line: str, config: dict[str, Any]) -> None:
    assert read("x", *line.split()).engine["speculative_config"] == config


def test_a_tree_counts_the_token_before_its_guesses() -> None:
    with pytest.raises(InvalidArgument, match="must be at least 2, got 1"):
        read("x", "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "1")


def test_what_changes_nothing_is_taken_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = read("x", "--mlock", "--log-level", "debug", "--enable-auto-tool-choice")
    assert found.engine == {}
    assert [record.getMessage().split(" changes nothing: ")[0] for record in caplog.records] == [
        "serve: --mlock",
        "serve: --log-level debug",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x --lora-modules a=b", "--lora-modules .* merge them into the checkpoint"),
        ("x --watermark", "--watermark is not supported: texts are not marked"),
        ("x --tools all", "--tools all is not supported: tools run at the client"),
        ("x --sleep-idle-seconds 60", "--sleep-idle-seconds 60 is not supported: stop the server"),
        ("x --pooling rank", "--pooling rank is not supported; it may be mean, cls, last"),
        ("x --enable-dp-attention", "--enable-dp-attention is not supported"),
        ("x --samplers top_k", "--samplers top_k is not supported: send it in each request's body"),
        ("x --reasoning-budget 64", "send thinking_token_budget in each request's body"),
        ("x --speculative-algorithm DFLASH", "--speculative-algorithm DFLASH is not supported"),
        (
            "x --speculative-algorithm NEXTN --speculative-draft-model-path d",
            "--speculative-draft-model-path d is not supported with --speculative-algorithm NEXTN",
        ),
        ("x --speculative-accept-threshold-single 0.5", "threshold-single 0.5 is not supported"),
        ("x -ctk q4_1", "--cache-type-k q4_1 is not supported; it may be f32, f16"),
        ("x -pcp 2", "prefill_context_parallel_size=2 is not supported"),
    ],
)
def test_what_is_not_here_is_refused_by_its_name(line: str, message: str) -> None:
    with pytest.raises(NotSupported, match=message):
        read(*line.split())


def test_a_value_that_is_none_is_told_by_the_flag() -> None:
    with pytest.raises(InvalidArgument, match="--parallel must be a number, got 'many'"):
        read("x", "-np", "many")
    with pytest.raises(InvalidArgument, match="not both"):
        read("x", "-m", "y")
    assert read("x", "-m", "x").models == ["x"]


def test_a_file_may_have_the_names_of_others(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model-path: x\ncontext_length: 512\nuvicorn-log-level: info\nenforce-eager: true\n"
        "disable-radix-cache: true\nenable-metrics: true\nno-webui: false\n"
        "unknown_fields: ignore\nany-model-name: true\nopen_metrics: false\n"
        "temp: 0.5\ndefault-chat-template-kwargs: {enable_thinking: false}\n"
        "override-generation-config: {top_k: 5}\nleniency: closed_schemas\n"
    )
    found = resolve({}, str(path))
    assert set(found.server.leniency.split(",")) == {
        *("unknown_fields", "any_model_name", "closed_schemas")
    }
    assert found.models == ["x"]
    assert found.engine == {
        "max_model_len": 512,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "override_generation_config": {"temperature": 0.5, "top_k": 5},
        "default_chat_template_kwargs": {"enable_thinking": False},
    }
    path.write_text("lora-modules: [a=b]\n")
    with pytest.raises(NotSupported, match="merge them"):
        resolve({}, str(path))


def test_every_row_sets_a_setting_and_no_flag_is_in_two() -> None:
    rows = peer_flags().values()
    flags = [flag for row in rows for flag in row.flags]
    assert len(set(flags)) == len(flags)
    assert {row.setting for row in rows} - {""} <= set(TAKEN)
    assert [row.name for row in rows if row.name in TAKEN] == ["model"]  # a file has it itself


@pytest.mark.parametrize(
    "words",
    [
        ["--max-model-len", "9999999"],
        ["--quantization", "awq"],
        ["--kv-cache-dtype", "int2"],
        ["--gpu-memory-utilization", "7"],
        ["--max-num-seqs", "0"],
        ["--trace", "/no/such/folder/x"],
        ["--port", "99999"],
        ["--leniency", "everything"],
        ["./no-such-model"],
        ["Qwen/Qwen3-8B", "--max-num-seqs", "0"],
        ["x=a", "x=b"],
    ],
)
def test_the_settings_are_not_shown_where_the_start_would_refuse_them(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words, "--show-config"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("llmserve: ")


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("-dp 4 -dpl 2 -dpr 2 -dpa 10.0.0.1 -dpp 13345 --data-parallel-hybrid-lb", 2),
        ("-dp 4 --data-parallel-external-lb --data-parallel-rank 3", 1),
        ("--data-parallel-size 3 --data-parallel-hybrid-lb", 3),
        ("--data-parallel-size 3 --no-data-parallel-hybrid-lb", 3),
    ],
)
def test_a_server_of_several_runs_its_own_replicas(line: str, own: int) -> None:
    assert read("x", *line.split()).engine["data_parallel_size"] == own


def test_a_share_of_replicas_that_there_is_not_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("data-parallel-hybrid-lb: true\ndata_parallel_size_local: 2\n")
    for line, error, told in (
        ("-dp 2 -dpl 3 --data-parallel-hybrid-lb", InvalidArgument, "_local=3 is more than data_"),
        ("-dp 2 -dpl 0 --data-parallel-hybrid-lb", InvalidArgument, "_local must be a number of"),
        ("-dp 2 -dpl 1", NotSupported, "data_parallel_size_local=1 .* llmserve route before them"),
        ("-dp 2 -dpa x --no-data-parallel-hybrid-lb", NotSupported, "data_parallel_address='x'"),
        (f"--config {file}", InvalidArgument, "_local=2 is more than data_parallel_size=1"),
    ):
        with pytest.raises(error, match=told):
            read("x", *shlex.split(line))
    assert read("x", "-dp", "4", "--config", str(file)).engine == {"data_parallel_size": 2}
