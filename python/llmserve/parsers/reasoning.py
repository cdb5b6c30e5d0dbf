"""How families of models write their reasoning: one table."""

from dataclasses import dataclass

from llmserve.parsers.lark import special_token_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningStyle:
    """A section at the beginning of an answer. Of several signs, the first is what a grammar
    asks for."""

    name: str
    aliases: tuple[str, ...] = ()  # vLLM's names for models that write so
    starts: tuple[str, ...]
    ends: tuple[str, ...]
    between: str = ""  # what stands between the section and what follows it
    answer_begin: str = ""  # what begins an answer
    answer: tuple[str, str] = ("", "")  # signs that may stand around one, and are none of it
    # What in a chat template tells it: any text of these, or all of a tuple
    hints: tuple[str | tuple[str, ...], ...] = ()

    @property
    def signs(self) -> tuple[str, ...]:
        """Those of its texts that may be special tokens, one by one."""
        texts = (*self.starts, *self.ends, self.between, self.answer_begin, *self.answer)
        return tuple(sign for text in texts for sign in special_token_texts(text))

    def is_taught_by(self, chat_template: str) -> bool:
        """Whether a chat template shows this style."""
        return any(
            all(text in chat_template for text in ((hint,) if isinstance(hint, str) else hint))
            for hint in self.hints
        )

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt ends within a section."""
        return prompt.rstrip().endswith(self.starts)


# In the order in which a template is looked at: the first whose hint is in it.
REASONING_STYLES: tuple[ReasoningStyle, ...] = (
    ReasoningStyle(
        name="openai_gptoss",
        aliases=("gptoss", "gpt-oss", "gpt_oss", "GptOss", "openai"),
        starts=("<|channel|>analysis<|message|>",),
        ends=("<|end|>",),
        between="<|start|>assistant",
        answer_begin="<|channel|>final<|message|>",
        hints=("<|channel|>analysis",),
    ),
    ReasoningStyle(
        name="mistral",
        starts=("[THINK]",),
        ends=("[/THINK]",),
        hints=("[/THINK]",),
    ),
    ReasoningStyle(
        name="seed_oss",
        starts=("<seed:think>",),
        ends=("</seed:think>",),
        hints=("</seed:think>",),
    ),
    ReasoningStyle(
        name="cohere_command",
        starts=("<|START_THINKING|>",),
        ends=("<|END_THINKING|>",),
        hints=("<|END_THINKING|>",),
    ),
    ReasoningStyle(
        name="granite",
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
        hints=("Here is my thought process:", "Here's my thought process:"),
    ),
    ReasoningStyle(
        name="ernie45",
        starts=("<think>",),
        ends=("</think>",),
        answer=("<response>", "</response>"),
        hints=(("</think>", "<response>"),),
    ),
    ReasoningStyle(
        name="hunyuan_a13b",
        aliases=("hunyuan",),
        starts=("<think>",),
        ends=("</think>",),
        answer=("<answer>", "</answer>"),
        hints=(("</think>", "<answer>"),),
    ),
    ReasoningStyle(
        name="think",
        aliases=(
            *("qwen3", "qwen3-thinking", "deepseek_r1", "deepseek-r1", "deepseek_v3"),
            *("deepseek-v3", "deepseek_v31", "glm45", "glm47", "kimi_k2", "minimax_m2", "minimax"),
            *("nemotron_v3", "nano_v3", "olmo3", "holo2", "step3", "step3p5", "mimo", "interns1"),
        ),
        starts=("<think>",),
        ends=("</think>",),
        hints=("</think>",),
    ),
)

# Names for none of them: what is thought stays in the content. vLLM has the second.
NO_REASONING = ("none", "identity")
