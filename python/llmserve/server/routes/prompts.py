"""Prompts of request bodies, brought to what AsyncLLM takes."""

from collections.abc import Callable
from functools import partial
from typing import Any

from llmserve.chat.chat_template import chat_request
from llmserve.common.text_threads import on_text_thread
from llmserve.prompts import SinglePrompt, TextPrompt, TokensPrompt
from llmserve.server.http.errors import ApiError
from llmserve.server.models import ServedModel
from llmserve.server.routes.bodies import ChatBody, TokenizeBody
from llmserve.server.routes.sampling import refuse_given
from llmserve.tokenization.tokenizer import Tokenizer

# Raises PromptTooLong if a text cannot fit, before it is tokenized.
CheckText = Callable[[str], None]


async def prompts(
    name: str,
    value: str | list[Any],
    model: ServedModel,
    max_num: int,
    *,
    add_special_tokens: bool = True,
    cache_salt: str = "",
    is_truncated: bool = False,
) -> list[SinglePrompt]:
    """One entry a prompt: `value` is a text, token ids, or a list of either. They share cached
    blocks within cache_salt. is_truncated: any length fits. Raises ApiError, InvalidArgument."""
    items = [value] if isinstance(value, str) or _is_ids(value) else value
    if not items:
        raise ApiError(400, f"{name} is empty; give at least one", param=name)
    if len(items) > max_num:
        raise ApiError(
            400, f"{name} has {len(items)} entries, and at most {max_num} are taken", param=name
        )
    result: list[SinglePrompt] = []
    for idx, item in enumerate(items):
        if isinstance(item, str):
            tokenizer = model.tokenizer()
            if add_special_tokens:
                result.append(TextPrompt(prompt=item, cache_salt=cache_salt))
            else:
                check_text = None if is_truncated else model.llm.check_text
                encode = partial(_bare_token_ids, item, tokenizer, check_text)
                ids = await on_text_thread(len(item), encode)
                result.append(
                    TokensPrompt(prompt=item, prompt_token_ids=ids, cache_salt=cache_salt)
                )
        elif isinstance(item, list):
            result.append(TokensPrompt(prompt_token_ids=item, cache_salt=cache_salt))
        else:
            raise ApiError(
                400,
                f"{name} must be a text, token ids, or a list of either; entry {idx} is a number "
                f"among others",
                param=name,
            )
    return result


def _bare_token_ids(text: str, tokenizer: Tokenizer, check_text: CheckText | None) -> list[int]:
    if check_text is not None:
        check_text(text)
    (token_ids,) = tokenizer.encode_chat([text])
    return token_ids


def chat_prompt(
    body: ChatBody | TokenizeBody, tokenizer: Tokenizer, check_text: CheckText | None = None
) -> tuple[str, list[int]]:
    """A conversation as the model's template writes it, and its token ids [T]. check_text: None
    where any length fits. Raises ApiError, InvalidArgument."""
    refuse_given(body, ("chat_template",), "the server's own template is used")
    refuse_given(body, ("documents",), "pass them in chat_template_kwargs or in the messages")
    if not body.messages:
        raise ApiError(400, "messages is empty; give at least one", param="messages")
    continues = bool(body.continue_final_message)
    generation_prompt = body.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not continues
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    tools = body.tools if body.tool_choice != "none" else None
    request = chat_request(generation_prompt, continues, tools, variables)
    (text,), _ = tokenizer.render_chat(body.messages, None, request)
    return text, _bare_token_ids(text, tokenizer, check_text)


def _is_ids(value: list[Any]) -> bool:
    return set(map(type, value)) == {int}
