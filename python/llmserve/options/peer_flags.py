"""The flags of `vllm serve`, SGLang and llama-server that have other names here, change nothing, or
are of what is not here: one table. Arguments of engines are in common/vllm_arguments.py.

A flag is written as its long name, with `=` behind it where it takes a value and `*` where it takes
several; `=x` is a value at which it is taken without a word, and `|-x` another name.
"""

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmserve.common.arguments import describe
from llmserve.common.units import parse_tokens
from llmserve.errors import InvalidArgument, NotSupported
from llmserve.options.peer_speculation import GUESSING

_log = logging.getLogger(__name__)
Convert = Callable[[str, str], object]  # of flag and text; None: nothing is set


def _number(kind: type[int] | type[float]) -> Convert:
    def convert(flag: str, text: str) -> object:
        try:
            return kind(text)
        except ValueError:
            raise InvalidArgument(f"{flag} must be a number, got {describe(text)}") from None

    return convert


def _unless(kept: str, convert: Convert) -> Convert:
    """The flag's value for what is the default here."""
    return lambda flag, text: None if text == kept else convert(flag, text)


def _text(_flag: str, text: str) -> str:
    return text


def _names(_flag: str, text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _own_name(flag: str, _text: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _json(flag: str, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"{flag} must be JSON, got {describe(text)}: {error}") from None


def _sampling(name: str, kind: type[int] | type[float]) -> Convert:
    number = _number(kind)
    return lambda flag, text: {name: number(flag, text)}


def _thinking(flag: str, text: str) -> object:
    if text not in ("0", "-1"):
        raise NotSupported(
            f"serve: {flag} {text} is not supported: send thinking_token_budget in each request's "
            f"body; 0 turns thinking off, -1 bounds it by nothing"
        )
    return {"enable_thinking": False} if text == "0" else None


def _field(name: str) -> Convert:
    return lambda flag, text: {name: _json(flag, text)}


def _always(value: object) -> Convert:
    return lambda _flag, _text: value


def _one_of(**values: object) -> Convert:
    def convert(flag: str, text: str) -> object:
        if text not in values:
            raise NotSupported(
                f"serve: {flag} {text} is not supported; it may be {', '.join(values)}"
            )
        return values[text]

    return convert


def _layers(flag: str, text: str) -> str | None:
    if text == "0":
        return "cpu"
    _log.warning("serve: %s=%s changes nothing: a model is on one device, as a whole", flag, text)
    return None


def _unix(_flag: str, text: str) -> str:
    return f"unix:{text}"


def _from_off(flag: str, text: str) -> object:
    """0 turns it off here, and -1 there."""
    return 0.0 if text == "-1" else _FLOAT(flag, text)


_INT, _FLOAT = _number(int), _number(float)
_CACHE_TYPES = _one_of(
    f32="float32", f16="auto", bf16="bfloat16", auto="auto", float32="float32", fp8="fp8"
)

# By setting of ours: the names that others have for it, and what their text becomes.
_SETS: tuple[tuple[str, str, Convert], ...] = (
    ("model", "model=|-m model-path= hf-repo=|-hf|-hfr", _text),
    ("served_model_name", "alias=|-a", _names),
    ("tokenizer", "tokenizer-path=", _text),
    ("chat_template", "chat-template-file=", _text),
    ("max_model_len", "ctx-size=|-c", _unless("0", parse_tokens)),
    ("max_model_len", "context-length=", parse_tokens),
    ("max_num_seqs", "parallel=|-np max-running-requests=", _unless("-1", _INT)),
    ("max_num_batched_tokens", "batch-size=|-b", _INT),
    ("max_num_batched_tokens", "chunked-prefill-size=", _unless("-1", _INT)),
    ("max_output_tokens", "predict=|-n n-predict=", _unless("-1", _INT)),
    ("max_waiting_requests", "max-queued-requests= max-num-queued-reqs=", _INT),
    ("max_waiting_tokens", "max-num-queued-tokens=", _INT),
    ("gpu_memory_utilization", "mem-fraction-static= device-memory-utilization=", _FLOAT),
    ("drain_timeout", "shutdown-timeout=", _FLOAT),
    ("num_threads", "t=|-t", _unless("-1", _INT)),
    ("seed", "random-seed= s=|-s", _unless("-1", _INT)),
    ("block_size", "page-size=", _INT),
    ("scheduling_policy", "schedule-policy=", _one_of(fcfs="fcfs", lpm=None, priority="priority")),
    ("enable_prefix_caching", "disable-radix-cache no-cache-prompt", _always(False)),
    ("enforce_eager", "disable-cuda-graph", _always(True)),
    ("enable_chunked_prefill", "disable-chunked-prefill", _always(False)),
    ("kv_cache_dtype", "cache-type-k=|-ctk cache-type-v=|-ctv", _CACHE_TYPES),
    ("device", "n-gpu-layers=|-ngl gpu-layers=", _layers),
    ("stream_flush_tokens", "stream-interval=", _INT),
    ("read_timeout", "timeout=|-to", _FLOAT),
    ("leniency", "any-model-name open-metrics closed-schemas", _own_name),
    ("leniency", "unknown-fields=", _one_of(ignore="unknown_fields", refuse=None)),
    ("default_chat_template_kwargs", "chat-template-kwargs=", _json),
    ("leniency", "enable-force-include-usage", _always("stream_usage")),
    ("leniency", "return-tokens-as-token-ids", _always("token_ids")),
    ("host", "uds=", _unix),
    ("allowed_origins", "cors-origins=", _text),
    ("pooler_config", "override-pooler-config=", _json),
    (
        "pooler_config",
        "pooling=",
        _one_of(**{name: {"pooling_type": name.upper()} for name in ("mean", "cls", "last")}),
    ),
    ("hf_overrides", "rope-scaling=", _field("rope_scaling")),
    ("hf_overrides", "rope-theta=", _field("rope_theta")),
    ("hf_overrides", "json-model-override-args=", _json),
    ("default_chat_template_kwargs", "enable-thinking", _always({"enable_thinking": True})),
    ("default_chat_template_kwargs", "reasoning-budget=", _thinking),
    (
        "default_chat_template_kwargs",
        "reasoning=|-rea",
        _one_of(on={"enable_thinking": True}, off={"enable_thinking": False}, auto=None),
    ),
    (
        "default_chat_template_kwargs",
        "reasoning-effort=",
        _unless("default", lambda _flag, text: {"reasoning_effort": text}),
    ),
    ("stream_keep_alive", "sse-ping-interval= sse-keep-alive-interval=", _from_off),
    ("log_format", "log-jsonl", _always("json")),
    *(("speculative_config", names, convert) for names, convert in GUESSING),
    ("override_generation_config", "temp= temperature=", _sampling("temperature", float)),
    ("override_generation_config", "top-k=", _sampling("top_k", int)),
    ("override_generation_config", "top-p=", _sampling("top_p", float)),
    ("override_generation_config", "min-p=", _sampling("min_p", float)),
    ("override_generation_config", "repeat-penalty=", _sampling("repetition_penalty", float)),
    ("override_generation_config", "presence-penalty=", _sampling("presence_penalty", float)),
    ("override_generation_config", "frequency-penalty=", _sampling("frequency_penalty", float)),
    ("override_generation_config", "top-n-sigma=", _unless("-1", _sampling("top_n_sigma", float))),
    ("override_generation_config", "preferred-sampling-params=", _json),
    ("ssl_keyfile", "ssl-key-file=", _text),
    ("ssl_certfile", "ssl-cert-file=", _text),
    (
        "reasoning_parser",
        "reasoning-format=",
        _one_of(none="none", auto="auto", deepseek="auto"),
    ),
)

# By reason: what is taken with a warning. Without a reason the server does it anyhow.
_CHANGES_NOTHING: Mapping[str, str] = {
    "": """
        enable-auto-tool-choice enable-request-id-headers enable-tokenizer-info-endpoint
        enable-prompt-tokens-details enable-server-load-tracking jinja metrics
        enable-metrics cont-batching|-cb cache-prompt enable-cache-report props is-embedding
        embedding embeddings slots trust-request-chat-template enable-mixed-chunk prometheus-port=
        response-role=assistant chat-template-content-format=auto api-server-count=1|-asc
        tool-server=none allow-credentials tags= offline perf reasoning-preserve escape|-e
    """,
    "logs have one form, log_format": """
        uvicorn-log-level= log-level= log-level-http= max-log-len=
        disable-uvicorn-access-log disable-access-log-for-endpoints= enable-log-outputs
        enable-log-deltas log-error-stack log-requests log-requests-level= show-time-cost
        decode-log-interval= verbose|-v verbosity=|-lv log-disable log-verbose log-colors=
        log-prefix log-timestamps disable-log-requests-content crash-dump-folder=
        log-prompts-dir= no-perf
        aggregate-engine-logging logging-config= jit-monitor-mode= jit-monitor-verbose
        fail-on-environ-validation
    """,
    "the server is one process with one thread for text": """
        disable-frontend-multiprocessing api-server-count=|-asc tokenizer-worker-num=
        threads-http= threads-batch=|-tb http-workers= max-concurrent-requests-per-worker=
        detokenizer-worker-num= prio= poll= cpu-mask=|-C cpu-range=|-Cr cpu-strict= numa=
        cpu-mask-batch=|-Cb cpu-range-batch=|-Crb cpu-strict-batch= prio-batch= poll-batch=
        threads-draft=|-td|--spec-draft-threads reuse-port
        numa-bind numa-bind-cpus* numa-bind-nodes* renderer-num-workers=
    """,
    "HTTP is read by the server itself, and max_body_bytes bounds it": """
        h11-max-header-count= h11-max-incomplete-event-size=
    """,
    "CORS allows every method and header for allowed_origins": """
        allowed-methods= allowed-headers= cors-methods= cors-headers= cors-credentials
    """,
    "the template takes texts and parts alike": """
        chat-template-content-format=
    """,
    "calls of tools are as tool_choice says": """
        exclude-tools-when-tool-choice-none
    """,
    "/docs and /openapi.json are always there": """
        disable-fastapi-docs enable-offline-docs
    """,
    "weights are mapped, and read as they are needed": """
        mlock mmap no-mmap|-nmmap direct-io weight-loader-disable-mmap load-watch-interval=
        check-tensors load-mode=|-lm lazy-mode=|-lzm repack no-repack|-nr
        safetensors-prefetch-block-size= safetensors-prefetch-num-threads=
        allow-deprecated-quantization
    """,
    "the kernels are the device's": """
        flash-attn=|-fa sampling-backend= grammar-backend= prefill-attention-backend=
        decode-attention-backend= enable-torch-compile torch-compile-max-bs=
        cuda-graph-max-bs= cuda-graph-bs* disable-cuda-graph-padding
        enable-flashinfer-allreduce-fusion moe-runner-backend= fp8-gemm-backend=
        disable-flashinfer disable-flashinfer-sampling triton-attention-num-kv-splits=
        enable-nan-detection enable-deterministic-inference op-offload no-op-offload
        backend-sampling|-bs spec-draft-backend-sampling
        linear-backend= gdn-prefill-backend= kda-decode-backend= kda-prefill-backend=
        mamba-backend= mamba-ssu-algorithm= ir-op-priority= enable-flashinfer-autotune
        monokernel use-fp64-gumbel sparse-indexer-topk-backend=
    """,
    "steps take prompts and tokens together, within max_num_batched_tokens and max_stall_ms": """
        ubatch-size=|-ub schedule-conservativeness= max-prefill-tokens=
        num-continuous-decode-steps= disable-overlap-schedule num-scheduler-steps=
        multi-step-stream-outputs preemption-mode= no-cont-batching|-nocb
        prefill-max-requests= enable-dynamic-batch-tokenizer
        prefill-schedule-interval= long-prefill-token-threshold-adaptive
    """,
    "how many tokens are guessed is decided step by step, by what steps take": """
        draft-min=0|--draft-n-min|--spec-draft-n-min draft-p-min=0|--spec-draft-p-min
        draft-p-split=|--spec-draft-p-split spec-ngram-mod-n-min=0
        spec-ngram-simple-min-hits=1 spec-ngram-map-k-min-hits=1 spec-ngram-map-k4v-min-hits=1
        speculative-adaptive speculative-adaptive-config= speculative-ngram-branch-length=
        speculative-ngram-capacity=
    """,
    "the server is ready as soon as it listens": """
        warmups= skip-server-warmup no-warmup warmup
    """,
    "there is one device": """
        main-gpu=|-mg split-mode=|-sm tensor-split=|-ts base-gpu-id= gpu-id-step=
        gpu-layers-draft=|-ngld|--n-gpu-layers-draft|--spec-draft-ngl
        enable-p2p-check disable-custom-all-reduce nccl-init-addr= nccl-port=
        dist-init-addr= enable-nccl-nvls enable-symm-mem dist-timeout=
        cpu-distributed-timeout-seconds= disable-nccl-for-dp-synchronization
        enable-nccl-comm-suspend enable-cumem-allocator enable-shm-tensor-arena
    """,
    "the web page is not there": """
        no-webui no-ui webui ui-config=|--webui-config ui-config-file=|--webui-config-file
    """,
    "the prefix cache is bounded by memory": """
        cache-reuse= cache-ram=|-cram slot-prompt-similarity= ctx-checkpoints=
        radix-eviction-policy= swa-full kv-unified|-kvu cache-idle-slots kv-unified-per-slot=
        checkpoint-min-step=|-cms defrag-thold=|-dt fit=|-fit fit-target=|-fitt fit-ctx=|-fitc
    """,
    "that way of sampling is off": """
        xtc-threshold= repeat-last-n= dry-base= dry-allowed-length= dry-penalty-last-n=
        dry-sequence-breaker= adaptive-decay= dynatemp-exp= mirostat-lr= mirostat-ent=
    """,
    "text is read alone": """
        no-mmproj mmproj-auto
        mm-hasher-algorithm= mm-processor-device= mm-tensor-ipc= mm-ipc-gpu-memory-gb=
        mm-device-do-normalize trust-request-mm-kwargs video-pruning-method=
    """,
    "tokenizers read in threads of their own": """
        enable-tokenizer-batch-encode tokenizer-backend=
    """,
    "the protocol of each route is always there": """
        enable-response-api
    """,
    "usage has what OpenAI's has": """
        enable-usage-stats no-usage-stats
        enable-per-request-metrics per-request-spec-decode-metrics kv-cache-metrics-sample=
    """,
}

# By what to use: what is refused by its name.
_REFUSED: Mapping[str, str] = {
    "adapters are not applied; merge them into the checkpoint": """
        lora-modules* prompt-adapters* lora-paths* lora= lora-scaled*
        lora-init-without-apply max-loras-per-batch= lora-backend= control-vector=
        enable-prompt-adapter
        lora-target-modules* enable-moe-shared-loras enable-mixed-moe-lora-format
        specialize-active-lora max-lora-cls-labels= enable-tower-connector-lora
    """,
    '--speculative-config \'{"method": ..., "model": ...}\' says how tokens are guessed': """
        speculative-token-map=
        ctx-size-draft=|-cd lookup-cache-static=|-lcs lookup-cache-dynamic=|-lcd
        spec-synth-len= spec-synth-rates= device-draft=|-devd|--spec-draft-device
        cache-type-k-draft=|-ctkd|--spec-draft-type-k spec-default
        cache-type-v-draft=|-ctvd|--spec-draft-type-v
        speculative-accept-threshold-single=1.0 speculative-accept-threshold-acc=1.0
    """,
    "an LLM is one process on one device; run several behind llmserve route": """
        headless enable-dp-attention enable-ep-moe nccl-id= disaggregation-mode=
        disaggregation-ib-device= disaggregation-transfer-backend=
        disaggregation-bootstrap-port= rpc= data-parallel-multi-port-external-lb
        load-balance-method= ep-size=1|--ep|--expert-parallel-size enable-two-batch-overlap
        moe-a2a-backend=none deepep-mode=auto ep-num-redundant-experts=0 enable-elastic-ep
        dcp-comm-backend= dcp-kv-cache-interleave-size= cp-kv-cache-interleave-size=
        data-parallel-supervisor-port= dp-sync-interval= elastic-ep-max-dp-size=
        enable-fault-tolerance fault-tolerance-config= ec-transfer-config= enable-scale-out
        ec-manager-config= enable-ep-weight-filter enable-batch-sharded-sampling
    """,
    "KV blocks stay in one memory": """
        enable-hierarchical-cache hicache-ratio= hicache-size= hicache-write-policy=
        hicache-storage-backend= enable-lmcache cpu-offload= no-kv-offload|-nkvo
        n-cpu-moe=|-ncmoe cpu-moe|-cmoe override-tensor=|-ot slot-save-path=
        cpu-offload-params= offload-params= offload-group-size= offload-num-in-group=
        offload-prefetch-step= prefix-cache-retention-interval=
        max-total-tokens=
    """,
    (
        "nothing of others' code is loaded; parsers are in the table of tool_call_parser "
        "and reasoning_parser"
    ): """
        tool-parser-plugin= reasoning-parser-plugin= middleware* custom-weight-loader*
        logits-processors-plugin= enable-custom-logit-processor
    """,
    "prompts and answers of a server are texts": """
        skip-tokenizer-init enable-prompt-embeds
    """,
    "tools run at the client": """
        tool-server= mcp-server= tools= tools-runtime= mcp-servers-config= mcp-servers-json=
        ui-mcp-proxy|--webui-mcp-proxy agent|-ag
    """,
    "put a proxy in front of the server": """
        root-path= ssl-ca-certs= ssl-cert-reqs=0 ssl-ciphers= enable-ssl-refresh path=
        api-prefix= ssl-keyfile-password= fastapi-root-path= media-path=
    """,
    "give the keys in LLMSERVE_API_KEY and LLMSERVE_ADMIN_KEY": """
        api-key-file= admin-api-key=
    """,
    "send it in each request's body": """
        samplers= grammar= grammar-file=
        json-schema=|-j json-schema-file=|-jf response-role= ignore-eos logit-bias=|-l mirostat=0
        dry-multiplier=0.0 xtc-probability=0.0 typical=1.0 typical-p=1.0 dynatemp-range=0.0
        prefill-assistant adaptive-target=-1 sampler-seq=|--sampling-seq special|-sp
        reverse-prompt=|-r reasoning-budget-message= skip-chat-parsing
    """,
    "log_format and the environment say how to log": """
        log-config-file= log-file=
    """,
    "HTTP is what it speaks": """
        grpc-port=
        grpc grpc-mode tokens-only
    """,
    "models take text alone": """
        mmproj=|-mm mmproj-url=|-mmu no-mmproj-offload image-min-tokens= enable-multimodal
        vision-model= image-max-tokens= mtmd-batch-max-tokens= video-fps=
    """,
    "name the quantization behind the model, as in ORG/NAME:Q4_K_M": """
        hf-file=|-hff
    """,
    "give the checkpoint's folder, its file or its id on the Hub": """
        model-url=|-mu docker-repo=|-dr models-dir= models-max= models-preset=
        models-autoload
    """,
    "hf_overrides={...} changes fields of config.json": """
        rope-scale= rope-freq-base= rope-freq-scale= yarn-orig-ctx= yarn-ext-factor=
        yarn-attn-factor= override-kv= grp-attn-n= grp-attn-w= yarn-beta-slow= yarn-beta-fast=
    """,
    "a context that is full ends the text": """
        context-shift keep=0 cache-context-shift
    """,
    "completions end where the model ends them": """
        spm-infill
    """,
    "an LLM generates and embeds": """
        reranking rerank
    """,
    "stop the server to give its memory back": """
        sleep-idle-seconds=-1
    """,
    "vectors have length one": """
        embd-normalize=2
    """,
    "quantize a checkpoint with --quantization, or load one that is": """
        torchao-config= modelopt-quant= quantization-param-path= weight-cache-dtype=
    """,
    "texts are not marked": """
        watermark watermark-config=
    """,
    "which experts ran is not told": """
        enable-return-routed-experts return-sampling-mask
    """,
    "it is no test of loading": """
        dummy-weights
    """,
}


@dataclass(frozen=True, slots=True)
class PeerFlag:
    """A row: of its first name, the others are spellings."""

    name: str  # with underscores
    flags: tuple[str, ...]
    arity: str  # "": a switch, "=": a value, "*": several
    setting: str = ""
    convert: Convert = _text
    reason: str = ""
    is_refused: bool = False
    default: str | None = None  # at which it is taken without a word

    def settings(self, value: object) -> dict[str, object]:
        """What it sets. value: a text or several; True or False of a switch. Raises NotSupported,
        InvalidArgument."""
        flag = self.flags[0]
        if (self.arity == "" and value is False) or str(value) == self.default:
            return {}
        if self.setting:
            found = self.convert(flag, str(value))
            return {} if found is None else {self.setting: found}
        shown = flag if self.arity == "" else f"{flag} {value}"
        if self.is_refused:
            raise NotSupported(f"serve: {shown} is not supported: {self.reason}")
        if self.reason:
            _log.warning("serve: %s changes nothing: %s", shown, self.reason)
        return {}


def _rows(names: str, **details: object) -> list[PeerFlag]:
    rows = []
    for word in names.split():
        first, *others = word.split("|")
        arity = "*" if first.endswith("*") else "=" if "=" in first else ""
        name, _, default = first.rstrip("*").partition("=")
        long = f"--{name}" if len(name) > 1 else others.pop(0)
        rows.append(
            PeerFlag(
                name.replace("-", "_"),
                (long, *others),
                arity,
                default=default or None,
                **details,  # type: ignore[arg-type]  # fields by name
            )
        )
    return rows


def joined(before: object, found: object, is_list: bool) -> object:
    """What a setting is that was something before: fields are added to an object, and texts to a
    list of them."""
    if isinstance(before, dict) and isinstance(found, dict):
        return {**before, **found}
    return f"{before},{found}" if is_list and before else found


def peer_flags() -> dict[str, PeerFlag]:
    """By name. Where two rows have a flag, the first says what becomes of it; a default of another
    row counts, too."""
    rows = [
        *(row for s, names, convert in _SETS for row in _rows(names, setting=s, convert=convert)),
        *(row for why, names in _CHANGES_NOTHING.items() for row in _rows(names, reason=why)),
        *(
            row
            for why, names in _REFUSED.items()
            for row in _rows(names, reason=why, is_refused=True)
        ),
    ]
    found: dict[str, PeerFlag] = {}
    for row in rows:
        known = found.get(row.name)
        if known is None or known.default is not None:
            default = row.default if known is None else known.default
            found[row.name] = dataclasses.replace(row, default=default)
    return found


# Other names of arguments of engines.
_SPELLINGS: Mapping[str, str] = {
    **dict.fromkeys(("-tp", "--tp", "--tp-size"), "--tensor-parallel-size"),
    **dict.fromkeys(("-pp", "--pp", "--pp-size"), "--pipeline-parallel-size"),
    **dict.fromkeys(("-dp", "--dp", "--dp-size"), "--data-parallel-size"),
    "-dpl": "--data-parallel-size-local",
    "-dpr": "--data-parallel-start-rank",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-sc": "--speculative-config",
}
_LEVEL = re.compile(r"-O(=?\d*|\..*)", re.DOTALL)


def spelled(word: str) -> str:
    """A word of a command line by the names that are here.

    >>> spelled("-tp=2"), spelled("-O3"), spelled("-O.mode=3")
    ('--tensor-parallel-size=2', '--compilation-config=3', '--compilation-config.mode=3')
    """
    if match := _LEVEL.fullmatch(word):
        level = match[1].lstrip("=")
        return "--compilation-config" + (f"={level}" if level.isdigit() else level)
    end = next((i for i, character in enumerate(word) if character in "=."), len(word))
    return _SPELLINGS.get(word[:end], word[:end]) + word[end:]
