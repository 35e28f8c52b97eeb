"""Requests of OpenAI's API as data, with vLLM's usual extensions. Answers are in `answer_schema.py`.

A field that is null counts as absent, as in OpenAI's API. Fields that are not listed here change nothing, and a header
says so (`json_body.py`); those of `UnsupportedFields` are listed so that they can be refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ..grammars.response_format import Choices, JsonSchema, ResponseFormat, StructuredOutputs
from ..http.errors import invalid_value

# The field `prompt` of a completion request: a text, a list of texts, of token ids, or of lists of token ids.

T = TypeVar("T")


def same_kind(value: object, kind: type[T], position: int) -> T:
    """The value. Raises a 400 unless it is of the kind that the first one in the list is."""
    if not isinstance(value, kind):
        raise invalid_value(f"prompt[{position}]", "texts, token ids and lists of token ids cannot be mixed.")
    return value


# Messages of a chat, and the tools that a model may call in it, as data of OpenAI's API.

MAX_TOOLS = 256  # OpenAI takes 128 functions; agents with several MCP servers have more
MAX_TOOL_CALLS = 256  # of one message
MAX_DOCUMENTS = 1024

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Name = Annotated[str, Meta(max_length=1024)]
# Dots and 128 characters are MCP's; OpenAI takes 64.
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields in the order in which templates write them."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="A JSON schema of an object.")] = None
    returned: Annotated[dict[str, Any] | None, Meta(description="A JSON schema, as transformers writes it.")] = (
        msgspec.field(name="return", default=None)
    )
    response: Annotated[dict[str, Any] | None, Meta(description="A JSON schema, as Gemma's template reads it.")] = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool of type `function`. Tools of other types are left out."""

    type: str
    function: FunctionDefinition | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    name: FunctionName


class NamedTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


class FunctionCall(msgspec.Struct, frozen=True):
    name: Name
    arguments: Annotated[str | None, Meta(description="JSON of an object.")] = None


class ToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall
    id: Name | None = None
    type: Literal["function"] = "function"


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None
    function_call: Annotated[FunctionCall | None, Meta(description="A tool call, of old.")] = None
    reasoning_content: Annotated[str | None, Meta(description="What an assistant thought first.")] = None
    reasoning: Annotated[str | None, Meta(description="The same; it counts where both are given.")] = None
    refusal: str | None = None
    audio: Annotated[Any, Meta(description="Left out of what was said; else refused but null.")] = None


StopString = Annotated[str, Meta(min_length=1, max_length=1024)]  # text that may become one is held back
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    Meta(description="Left out where the chat template does not know it."),
]
MAX_LOGIT_BIASES = 1024  # each bias costs time at every token
MAX_BAD_WORDS = 128
MAX_TIMEOUT_S = 86_400


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: Annotated[bool | None, Meta(description="A last chunk has the usage.")] = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="Running usage in every chunk.")] = None  # vLLM's


class UnsupportedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that would change the answer and that motet does not support. See `json_body.py`."""

    audio: Any = None
    modalities: Any = None
    chat_template: Any = None
    suffix: Any = None
    prompt_embeds: Any = None
    logits_processors: Any = None
    early_stopping: Any = None
    spaces_between_special_tokens: Any = None
    lora_path: Any = None  # SGLang's, as are the next five
    stop_regex: Any = None
    no_stop_trim: Any = None
    custom_logit_processor: Any = None
    separate_reasoning: Any = None
    return_hidden_states: Any = None
    repetition_detection: Any = None  # vLLM's, as are the next three
    detokenize: Any = None
    vllm_xargs: Any = None


class GenerationFields(UnsupportedFields, frozen=True, kw_only=True):
    """The fields that completion requests and chat requests share."""

    model: Annotated[str, Meta(description="The base's name, or one of your adapters'.")]
    n: Annotated[int, Meta(ge=1, le=128, description="Choices for each prompt; with beam search its beams.")] | None = (
        None
    )
    best_of: Annotated[int, Meta(ge=1, description="So many are drawn, and the best `n` answered.")] | None = None
    max_tokens: Annotated[int, Meta(ge=0, description="0: the prompt is computed, and nothing after it.")] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1, description="0: the likeliest token alone.")] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 and -1: off.")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.001, le=100)] | None = None  # logits are divided by it
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_LOGIT_BIASES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, description="Before them nothing stops the answer.")] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LOGIT_BIASES, description="No others come.")] | None
    ) = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS, description="They never come.")] | None = None
    include_stop_str_in_output: Annotated[bool | None, Meta(description="Show the stop string.")] = None
    skip_special_tokens: Annotated[bool | None, Meta(description="False: special tokens are shown.")] = None
    ignore_eos: Annotated[bool | None, Meta(description="Go on behind an end-of-sequence token.")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Annotated[
        bool | None, Meta(description="Return the token ids of the prompt and of the answer.")
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, Meta(description="Log-probabilities name tokens `token_id:5`.")
    ] = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, description="So many of the prompt's last tokens are read; -1: what has room.")]
        | None
    ) = None
    add_special_tokens: Annotated[bool | None, Meta(description="Begin prompts as the model's tokenizer does.")] = None
    use_beam_search: Annotated[bool | None, Meta(description="Search for the likeliest, with `n` beams.")] = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10, description="Of beam search.")] | None = None
    prompt_logprobs: (
        Annotated[
            int,
            Meta(ge=0, le=20, description="For each token of the prompt, its own and this number of the likeliest."),
        ]
        | None
    ) = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S, description="Seconds for the whole answer.")] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100, description="Among your own, the higher goes first.")] | None = None
    service_tier: Annotated[str, Meta(max_length=64, description="`flex` yields to everybody.")] | None = None
    user: Annotated[str, Meta(max_length=512, description="For whom you ask, in your own words.")] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=1024, description="Makes no difference.")] | None = None
    cache_salt: Annotated[str, Meta(max_length=1024, description="KV is shared only with equal salts.")] | None = None
    thinking_token_budget: (
        Annotated[
            int,
            Meta(ge=-1, description="Most tokens of thoughts, where their marks are known; -1: no bound."),
        ]
        | None
    ) = None
    # The form of the answer: one of these, of which the last eight are what older servers call them.
    response_format: Annotated[ResponseFormat | None, Meta(description="The form of the answer.")] = None
    structured_outputs: Annotated[StructuredOutputs | None, Meta(description="The form of the answer.")] = None
    guided_json: Annotated[JsonSchema | str | None, Meta(description="`structured_outputs.json`.")] = None
    guided_regex: Annotated[str | None, Meta(description="`structured_outputs.regex`.")] = None
    guided_choice: Annotated[Choices | None, Meta(description="`structured_outputs.choice`.")] = None
    guided_grammar: Annotated[str | None, Meta(description="`structured_outputs.grammar`.")] = None
    guided_whitespace_pattern: Annotated[str | None, Meta(description="Of white space in JSON.")] = None
    guided_decoding_backend: Annotated[str | None, Meta(description="Ignored: it is llguidance.")] = None
    structural_tag: Annotated[str | None, Meta(description="`structured_outputs.structural_tag`.")] = None
    json_schema: Annotated[JsonSchema | str | None, Meta(description="`structured_outputs.json`.")] = None
    regex: Annotated[str | None, Meta(description="`structured_outputs.regex`.")] = None
    ebnf: Annotated[str | None, Meta(description="`structured_outputs.grammar`.")] = None


class RefusedInCompletions(GenerationFields, frozen=True, kw_only=True):
    """Fields of chats that would change a completion if they meant something there."""

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    documents: Any = None
    reasoning_effort: Any = None
    thinking_token_budget: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(RefusedInCompletions, frozen=True, kw_only=True):
    prompt: Annotated[
        str | list[str | int | list[int]], Meta(description="A text, several, token ids, or several lists of them.")
    ]
    echo: Annotated[bool | None, Meta(description="Begin with the prompt; `logprobs` have its tokens, too.")] = None
    logprobs: Annotated[
        bool | Annotated[int, Meta(ge=0, le=20)] | None,
        Meta(description="For each token, its own and this number of the likeliest; `true` is 1."),
    ] = None

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens beside each token's own log-probability; None: no log-probabilities."""
        return None if self.logprobs is None or self.logprobs is False else int(self.logprobs)


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS, description="The template shows them.")] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: (
        Annotated[list[FunctionDefinition], Meta(max_length=MAX_TOOLS, description="`tools`, of old.")] | None
    ) = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    include_reasoning: Annotated[bool | None, Meta(description="False: leave the model's thoughts out.")] = None
    documents: (
        Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS, description="The template shows them.")] | None
    ) = None
    reasoning_effort: Effort | None = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, Meta(description="`medium`, or left out.")] = None
    web_search_options: Annotated[Any, Meta(description="Left out.")] = None
    max_completion_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Annotated[bool | None, Meta(description="For each token, its own.")] = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20, description="Number of the likeliest beside it.")] | None = None
    echo: bool | None = None
    add_generation_prompt: Annotated[bool | None, Meta(description="True by default; of the chat template.")] = None
    continue_final_message: Annotated[bool | None, Meta(description="The answer goes on where the last ends.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="For the chat template, as it is.")] = None


class InputFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class TranslatedChat(ChatRequest, frozen=True, kw_only=True):
    """A chat that was requested by another API."""

    left_out: list[str] = []  # names, as the client knows them, of what the chat has not
    places: dict[str, str] = {}  # the client's names of calls in the messages, by the chat's
    custom_tools: dict[str, InputFormat] = {}  # those of the tools whose only argument is a text


# The fields of requests with one answer, of any API.

_NO = Meta(description="`true` is refused.")


class OneAnswerFields(GenerationFields, frozen=True, kw_only=True):
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    prompt_logprobs: None = None  # an answer of these shows none
    use_beam_search: Annotated[bool | None, _NO] = None
    return_token_ids: Annotated[bool | None, _NO] = None


# Requests and answers of /tokenize, /detokenize and /version, as vLLM has them.


class TokenizeRequest(ChatRequest, frozen=True, kw_only=True):
    """A text, or a chat's request as it is: what says nothing of its prompt makes no difference."""

    model: Annotated[str, Meta(description="The base's name, or one of your adapters'; by default the base.")] = ""
    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    prompt: Annotated[str | None, Meta(description="A text, in place of messages.")] = None
    return_token_strs: Annotated[bool | None, Meta(description="The tokens as the vocabulary has them, too.")] = None


class TokenizeAnswer(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, Meta(description="The base's name, or one of your adapters'; by default the base.")] = ""
    tokens: list[TokenId]


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    prompt: str


class ServerVersion(msgspec.Struct, frozen=True):
    version: str
