"""Packages that people write agents with, in their default modes, against a server on a socket."""

from typing import Any, Literal

import openai
import pytest

from tests.server.serving import KEY

pydantic: Any = pytest.importorskip("pydantic", reason="comes with the clients")

# Clients leave sockets and event loops to the garbage collector, and warn of their own changes.
pytestmark = pytest.mark.filterwarnings(
    "ignore", "default::pytest.PytestUnraisableExceptionWarning"
)

QUESTION: list[Any] = [{"role": "user", "content": "Weather?"}]


class City(pydantic.BaseModel):  # type: ignore[misc]
    """A city."""

    name: Literal["Rome", "Oslo"]


def weather(name: Literal["Rome", "Oslo"]) -> str:
    """Weather of a city."""
    return f"Sunny in {name}."


FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": City.model_json_schema()},
}


def test_openai_streams_with_a_role_and_forced_calls(calling):
    with calling.openai() as client:
        options: Any = {"model": "tiny", "messages": QUESTION, "n": 2}
        tool = openai.pydantic_function_tool(City, name="weather")
        with client.chat.completions.stream(**options, tools=[tool]) as stream:
            final = stream.get_final_completion()
        for choice in final.choices:
            assert (choice.message.role, choice.finish_reason) == ("assistant", "tool_calls")
            assert choice.message.tool_calls[0].function.parsed_arguments.name
        plain = client.chat.completions.parse(
            model="tiny", messages=QUESTION, response_format=City, reasoning_effort="low"
        )
        assert plain.choices[0].message.parsed.name in ("Rome", "Oslo")
        for choice in "required", {"type": "function", "function": {"name": "weather"}}:
            made = client.chat.completions.create(
                model="tiny",
                messages=QUESTION,
                tools=[FUNCTION],
                tool_choice=choice,
                parallel_tool_calls=False,
            )
            assert len(made.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("provider", ["openai", "anthropic", "ollama_chat", "responses"])
def test_litellm(calling, provider, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it fetches one otherwise
    litellm = pytest.importorskip("litellm", reason="one of the clients")
    base = calling.url if provider == "openai" else calling.root
    options = {"api_base": base, "api_key": KEY}
    if provider == "responses":
        options["api_base"] = calling.url
        made = litellm.responses(model="openai/tiny", input="Hello", **options)
        assert made.output[-1].content[0].text == "Done."
        return
    name = f"{provider}/tiny"
    made = litellm.completion(model=name, messages=QUESTION, tools=[FUNCTION], **options)
    (call,) = made.choices[0].message.tool_calls
    assert call.function.name == "weather"
    messages = [
        *QUESTION,
        made.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "Sunny."},
    ]
    parts = litellm.completion(
        model=name, messages=messages, tools=[FUNCTION], stream=True, **options
    )
    assert "".join(one.choices[0].delta.content or "" for one in parts) == "Done."
    turns = [{"role": role, "content": "W"} for role in ("user", "assistant")]
    error: Any = litellm.ContextWindowExceededError
    if provider == "ollama_chat":
        error = litellm.BadRequestError
    with pytest.raises(error, match=r"maximum context length is|prompt is too long"):
        litellm.completion(model=name, messages=[*turns * 8_000, turns[0]], **options)


def test_langchain_openai(calling):
    chat = pytest.importorskip("langchain_openai", reason="one of the clients").ChatOpenAI
    options: Any = {"model": "tiny", "base_url": calling.url, "api_key": KEY, "max_retries": 0}
    model = chat(**options)
    called = model.bind_tools([FUNCTION], tool_choice="any").invoke("Weather?")
    assert called.tool_calls[0]["name"] == "weather"
    for method in "function_calling", "json_schema":
        made = model.with_structured_output(City, method=method).invoke("Weather?")
        assert made.name in ("Rome", "Oslo")
    assert "".join(one.content for one in model.stream("Hello")) == "Done."
    answer = chat(**options, use_responses_api=True).invoke("Hello")
    assert answer.content[0]["text"] == "Done."


def test_langchain_anthropic(calling):
    package = pytest.importorskip("langchain_anthropic", reason="one of the clients")
    model = package.ChatAnthropic(
        model="tiny", base_url=calling.root, api_key=KEY, max_retries=0, max_tokens=100
    )
    made = model.with_structured_output(City).invoke("Weather?")
    assert made.name in ("Rome", "Oslo")
    assert "".join(one.text for one in model.stream("Hello")) == "Done."


def test_langchain_ollama(calling):
    package = pytest.importorskip("langchain_ollama", reason="one of the clients")
    headers = {"headers": {"Authorization": f"Bearer {KEY}"}}
    model = package.ChatOllama(model="tiny", base_url=calling.root, client_kwargs=headers)
    assert model.bind_tools([FUNCTION]).invoke("Weather?").tool_calls[0]["name"] == "weather"
    assert model.with_structured_output(City).invoke("Weather?").name in ("Rome", "Oslo")


@pytest.mark.parametrize("protocol", ["chat", "responses", "anthropic"])
def test_pydantic_ai(calling, protocol):
    agents = pytest.importorskip("pydantic_ai", reason="one of the clients")
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if protocol == "anthropic":
        provider = AnthropicProvider(api_key=KEY, base_url=calling.root)
        model: Any = AnthropicModel("tiny", provider=provider)
    else:
        kind = OpenAIChatModel if protocol == "chat" else OpenAIResponsesModel
        model = kind("tiny", provider=OpenAIProvider(base_url=calling.url, api_key=KEY))
    asked = agents.Agent(model, output_type=City).run_sync("Weather?")
    assert asked.output.name in ("Rome", "Oslo")
    assert agents.Agent(model, tools=[weather]).run_sync("Weather?").output == "Done."


def test_instructor(calling):
    instructor = pytest.importorskip("instructor", reason="one of the clients")
    with calling.openai() as inner:
        client = instructor.from_openai(inner)
        made = client.chat.completions.create(
            model="tiny", messages=QUESTION, response_model=City, max_retries=0
        )
    assert made.name in ("Rome", "Oslo")
