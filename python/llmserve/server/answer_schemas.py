"""What answers with status 200 are made of, as JSON schemas. Each table has a line a field: its
name, its type and what it means. A `?` after a name: it may be missing; after a type: it may be
null. [type] is a list, and a name in capitals another table."""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_TABLES = {
    "Usage": """
        prompt_tokens integer tokens of all prompts
        completion_tokens integer new tokens
        total_tokens integer both
        prompt_tokens_details object cached_tokens: those of the prompts that were in the cache
        completion_tokens_details? object reasoning_tokens: thoughts; and guesses, right and wrong
    """,
    "ToolCall": """
        id string by which the result of the call is told
        type string function
        function object name, and arguments as JSON text
    """,
    "ReplicaModel": """
        names [string] those that requests may give
        numerics_class string servers with the same one give the same tokens, bit for bit
        max_model_len integer tokens of a prompt and its answer
        block_size integer tokens of a block of the KV cache
        num_kv_tokens integer tokens that the KV cache holds
        max_num_seqs integer sequences that run at once
        num_replicas integer engines within the process that share its weights
    """,
    "Replica": """
        epoch string another one after a restart
        is_draining boolean whether new requests are refused
        role string both, prefill or decode
        hands_over boolean whether hand_over_ticket is taken
        models [ReplicaModel] in the order of the command line
    """,
    "HandOverTicket": """
        ticket string the hand_over_ticket of a request here, and of one elsewhere
    """,
    "HandOverBegun": """
        has_begun boolean whether the first blocks can be fetched; false: not within 30 seconds
    """,
    "BlockEvents": """
        epoch string another one after a restart: numbers begin anew
        snapshot? object sequence and hashes: all blocks that are held, in base64
        batches? [object] sequence and events: each stored, removed or cleared, with hashes
    """,
    "ChatMessage": """
        role string assistant
        content string? the text; null beside calls alone
        reasoning string? what was thought
        reasoning_content string? the same, by the name that it once had
        tool_calls? [ToolCall] calls for the client to make
        refusal null there is none
        annotations null there are none
        audio null there is none
        function_call null see tool_calls
    """,
    "ChatChoice": """
        index integer which of the n
        message ChatMessage the answer
        logprobs object? content: an entry a token, with its top_logprobs
        finish_reason string stop, length, tool_calls or abort
        stop_reason integer|string? the stop string or token id; timeout where a time limit cut it
        token_ids [integer]? of the answer, where return_token_ids asks for them
    """,
    "ChatCompletion": """
        id string by which the log and /debug know the request
        object string chat.completion
        created integer seconds since 1970
        model string the model's first name
        choices [ChatChoice] one a sample
        usage Usage token counts
        prompt_logprobs [object?]? a row a token of the prompt, where they are asked for
        prompt_token_ids [integer]? where return_token_ids asks for them
        service_tier null as vLLM's
        system_fingerprint null as vLLM's
        kv_transfer_params null as vLLM's
    """,
    "CompletionChoice": """
        index integer prompt by prompt, sample by sample
        text string what goes on from the prompt
        logprobs object? tokens, token_logprobs, top_logprobs, text_offset
        finish_reason string stop, length or abort
        stop_reason integer|string? the stop string or token id; timeout where a time limit cut it
        token_ids [integer]? where return_token_ids asks for them
        prompt_logprobs [object?]? a row a token of the prompt, where they are asked for
        prompt_token_ids [integer]? where return_token_ids asks for them
    """,
    "Completion": """
        id string by which the log and /debug know the request
        object string text_completion
        created integer seconds since 1970
        model string the model's first name
        choices [CompletionChoice] one a prompt and sample
        usage Usage token counts
        service_tier null as vLLM's
        system_fingerprint null as vLLM's
        kv_transfer_params null as vLLM's
    """,
    "Embedding": """
        object string embedding
        index integer which input
        embedding [number]|string the vector, or its float32 values in base64
    """,
    "Embeddings": """
        object string list
        model string the model's first name
        data [Embedding] one an input
        usage object prompt_tokens and total_tokens, which are the same
    """,
    "Model": """
        id string a name that requests may have as their model
        object string model
        created integer when it was loaded, in seconds since 1970
        owned_by string llmserve
        root string the model's first name
        parent null there is none
        max_model_len integer tokens that a prompt and its answer may have together
    """,
    "Models": """
        object string list
        data [Model] one a name
    """,
    "Message": """
        id string by which the log and /debug know the request
        type string message
        role string assistant
        model string the model's first name
        content [object] blocks of type thinking, text and tool_use
        stop_reason string end_turn, max_tokens, stop_sequence or tool_use
        stop_sequence string? the one that ended it
        usage object input_tokens without cached ones, cache_read_input_tokens, output_tokens
    """,
    "MessageTokens": """
        input_tokens integer tokens of the prompt
    """,
    "Response": """
        id string by which it is gone on from
        object string response
        created_at integer seconds since 1970
        completed_at integer? likewise
        status string completed, incomplete, failed or, in a stream, in_progress
        incomplete_details object? reason: max_output_tokens
        error object? code and message
        model string the model's first name
        output [object] items of type reasoning, message and function_call
        usage object? input_tokens, output_tokens, total_tokens and their details
        previous_response_id string? the one that it goes on from
        instructions string? of the request
        max_output_tokens integer? of the request
        tools [object] of the request
        tool_choice string|object of the request
        parallel_tool_calls boolean of the request
        temperature number that was sampled with
        top_p number that was sampled with
        text object format: what the text had to match
        reasoning object effort, of the request
        truncation string auto or disabled
        store boolean whether it is kept
        metadata object of the request
    """,
    "DeletedResponse": """
        id string of the response
        object string response
        deleted boolean true
    """,
    "InputItems": """
        object string list
        data [object] the items
        first_id string? the first one's id
        last_id string? the last one's id
        has_more boolean false
    """,
    "InputTokens": """
        object string response.input_tokens
        input_tokens integer tokens of the prompt
    """,
    "OllamaChat": """
        model string the model's first name
        created_at string when the request came
        message object role, content, thinking and tool_calls
        done boolean whether it is the last line
        done_reason? string stop, length or load
        total_duration? integer nanoseconds from the request's arrival to its last token
        load_duration? integer 0: the model is there
        prompt_eval_count? integer tokens of the prompt
        prompt_eval_duration? integer nanoseconds to the first token
        eval_count? integer new tokens
        eval_duration? integer nanoseconds from the first token to the last
        logprobs? [object] an entry a token
    """,
    "LlamaCompletion": """
        index integer which prompt and sample
        content string what goes on from the prompt
        tokens [integer] its ids, where return_tokens asks for them
        stop boolean whether it is at its end
        id_slot integer -1: there are none
        tokens_predicted integer new tokens
        tokens_evaluated integer tokens of the prompt
        completion_probabilities? [object] an entry a token, where n_probs asks for them
        model? string the model's first name
        prompt? string the prompt's text
        generation_settings? object what was sampled with
        has_new_line? boolean whether there is a line break in the text
        truncated? boolean false: a prompt that does not fit is refused
        stop_type? string eos, word, limit or none
        stopping_word? string the stop string that ended it
        tokens_cached? integer tokens of the prompt that were in the cache
        timings? object tokens, milliseconds and tokens a second of prompt and answer
    """,
    "OllamaModels": """
        models [object] name, model, size, digest (of the name) and details of each
    """,
    "OllamaModel": """
        modelfile string FROM and the model's first name
        parameters string the model's own sampling parameters, a line each
        template string its chat template, in Jinja
        details object family, quantization_level and kin
        model_info object general.architecture and context_length
        capabilities [string] completion, tools, thinking
        modified_at string when it was loaded
    """,
    "Version": """
        version string of llmserve
    """,
    "Tokens": """
        count integer how many there are
        max_model_len integer tokens that a prompt and its answer may have together
        tokens [integer]|[object] their ids; with_pieces: objects of id and piece
        token_strs [string]? the text of each, where return_token_strs asks for it
    """,
    "Prompt": """
        prompt string the text
        content? string the same, by llama.cpp's name
    """,
    "TokenizerInfo": """
        tokenizer_class string? what kind of tokenizer it is
        chat_template string in Jinja; empty without one
        vocab_size integer tokens that it knows
        model_max_length integer as max_model_len
        max_model_len integer tokens that a prompt and its answer may have together
        bos_token string? begins a text
        eos_token string? ends one
        pad_token string? fills up
        unk_token string? stands for what is unknown
        added_tokens_decoder object special tokens by their id
    """,
    "Props": """
        default_generation_settings object n_ctx, and the model's own sampling params
        total_slots integer sequences that may run at once
        model_alias string the model's first name
        model_path string the same
        chat_template string in Jinja; empty without one
        bos_token string begins a text
        eos_token string ends one
        modalities object vision and audio: false
        build_info string llmserve and its version
        is_sleeping boolean whether its memory was given back
    """,
    "OllamaEmbeddings": """
        model string the model's first name
        embeddings [[number]] a vector a text
        total_duration? integer nanoseconds
        load_duration? integer 0
        prompt_eval_count? integer tokens of all texts
    """,
    "OllamaEmbedding": """
        embedding [number] of the text
    """,
    "OllamaStatus": """
        status string success
    """,
    "Health": """
        status string ok
        replicas? [object] of several engines of one model: model, replica, status and reason
    """,
    "Load": """
        server_load integer requests that are being answered
        num_sequences integer those that run or wait
        num_tokens integer prompt and new tokens of these at most
        models object num_running, num_waiting and kv_cache_usage of each, also by replica
    """,
    "RequestLife": """
        id string of the request
        model string the model's first name
        replica? integer of several, the one that ran it
        explanation? [string] what it did and why it waited, in words
        spans? [object] activity, reason, start_ms, duration_ms and steps of each
        prompts? [object] the same of each prompt, where there are several
    """,
}
_NAMES = ("string", "integer", "number", "boolean", "object", "null")


def answer_components() -> dict[str, Schema]:
    """The schemas by name, as components of an OpenAPI document."""
    components = {name: _object(table) for name, table in _TABLES.items()}
    generate = components["OllamaChat"]
    fields = {name: field for name, field in generate["properties"].items() if name != "message"}
    fields["response"] = {"type": "string", "description": "the text"}
    fields["thinking"] = {"type": "string", "description": "what was thought"}
    required = [name for name in generate["required"] if name != "message"]
    components["OllamaGenerate"] = {
        **generate,
        "properties": fields,
        "required": [*required, "response"],
    }
    return components


def _object(table: str) -> Schema:
    properties: dict[str, Schema] = {}
    required = []
    for line in filter(None, map(str.strip, table.splitlines())):
        name, kind, text = line.split(maxsplit=2)
        if not name.endswith("?"):
            required.append(name)
        properties[name.removesuffix("?")] = {**_kind(kind), "description": text}
    return {"type": "object", "properties": properties, "required": required}


def _kind(text: str) -> Schema:
    if text.endswith("?"):
        return {"anyOf": [*_alternatives(text[:-1]), {"type": "null"}]}
    kinds = _alternatives(text)
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _alternatives(text: str) -> list[Schema]:
    return [_one(kind) for kind in text.split("|")]


def _one(text: str) -> Schema:
    if text.startswith("["):
        return {"type": "array", "items": _kind(text[1:-1])}
    return {"type": text} if text in _NAMES else {"$ref": f"#/components/schemas/{text}"}


# The answer of each route, by method and path.
ANSWERS: Mapping[tuple[str, str], str] = {
    ("post", "/v1/chat/completions"): "ChatCompletion",
    ("post", "/v1/completions"): "Completion",
    ("post", "/v1/embeddings"): "Embeddings",
    ("post", "/v1/responses"): "Response",
    ("post", "/v1/responses/input_tokens"): "InputTokens",
    ("post", "/v1/chat/completions/input_tokens"): "InputTokens",
    ("post", "/v1/responses/{response_id}/cancel"): "Response",
    ("get", "/v1/responses/{response_id}"): "Response",
    ("delete", "/v1/responses/{response_id}"): "DeletedResponse",
    ("get", "/v1/responses/{response_id}/input_items"): "InputItems",
    ("post", "/v1/messages"): "Message",
    ("post", "/v1/messages/count_tokens"): "MessageTokens",
    ("post", "/completion"): "LlamaCompletion",
    ("post", "/api/chat"): "OllamaChat",
    ("post", "/api/generate"): "OllamaGenerate",
    ("post", "/api/show"): "OllamaModel",
    ("post", "/api/embed"): "OllamaEmbeddings",
    ("post", "/api/embeddings"): "OllamaEmbedding",
    ("post", "/api/pull"): "OllamaStatus",
    ("get", "/api/tags"): "OllamaModels",
    ("get", "/api/ps"): "OllamaModels",
    ("get", "/api/version"): "Version",
    ("get", "/v1/models"): "Models",
    ("get", "/v1/models/{model}"): "Model",
    ("post", "/tokenize"): "Tokens",
    ("post", "/detokenize"): "Prompt",
    ("post", "/apply-template"): "Prompt",
    ("get", "/tokenizer_info"): "TokenizerInfo",
    ("get", "/props"): "Props",
    ("get", "/health"): "Health",
    ("get", "/ping"): "Health",
    ("get", "/ready"): "Health",
    ("get", "/replica"): "Replica",
    ("post", "/hand_over/tickets"): "HandOverTicket",
    ("post", "/hand_over/begun"): "HandOverBegun",
    ("get", "/debug/block_events"): "BlockEvents",
    ("get", "/version"): "Version",
    ("get", "/load"): "Load",
    ("get", "/debug/requests/{request_id}"): "RequestLife",
}
# What the stream of a route is made of, where its body may ask for one.
STREAMS: Mapping[str, tuple[str, str]] = {
    "/v1/chat/completions": ("text/event-stream", "chunks, each with a delta; then [DONE]"),
    "/v1/completions": ("text/event-stream", "chunks, each a completion's piece; then [DONE]"),
    "/v1/responses": ("text/event-stream", "events response.created to response.completed"),
    "/v1/messages": ("text/event-stream", "events message_start to message_stop"),
    "/completion": ("text/event-stream", "results, the last with stop: true"),
    "/api/chat": ("application/x-ndjson", "a line of JSON a piece, the last with done: true"),
    "/api/generate": ("application/x-ndjson", "a line of JSON a piece, the last with done: true"),
}
