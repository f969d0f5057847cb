"""What is asked of each client: the script that runs in its environment, and the way out where it loses something."""

from dataclasses import dataclass

WAYS = ("spec", "stream", "model")  # a spec in the body, the same in a stream, a module as the model

# In front of every script. `say` reports what the client's caller gets to see: texts that may hold the field, headers.
PRELUDE = """
import json, os, sys
url, way, spec = os.environ["URL"], sys.argv[1], json.loads(os.environ["SPEC"])
stream, model = way == "stream", "demo:bridge" if way == "model" else "demo"
extra = {} if way == "model" else {"saesteer": spec}
ask = [{"role": "user", "content": "Where are you?"}]
def say(found, headers=None):
    text = found if isinstance(found, str) else json.dumps(found, default=str)
    report, names = '"applied"' in text.replace("\\\\", ""), " ".join(map(str, headers or ())).lower()
    print("\\nFOUND" + json.dumps({"report": report, "header": "x-saesteer-applied" in names}))
"""
_RAW = """
import httpx
headers = {"Authorization": "Bearer " + os.environ["KEY"]}
with httpx.stream("POST", url + path, json=body, headers=headers, timeout=120) as found:
    text = "".join(found.iter_text())
    assert found.status_code == 200, text
    say(text, found.headers)
"""
_CHAT = '{"model": model, "messages": ask, "max_tokens": 4, "stream": stream, **extra}'
_OPENAI = """
from openai import OpenAI
client = OpenAI(base_url=url + "/v1", api_key="none")
"""
_LITELLM = """
import litellm
given = {"model": f"{provider}/{model}", "api_base": url + "/v1", "api_key": "none"}
found = litellm.completion(**given, messages=ask, max_tokens=4, stream=stream, extra_body=extra)
headers = [*(found._hidden_params.get("additional_headers") or ()), *(getattr(found, "_response_headers", None) or ())]
say([one.model_dump() for one in found] if stream else found.model_dump(), headers)
"""
_PROXY = """
litellm_settings: {drop_params: true, num_retries: 0}
model_list:
  - model_name: openai-demo
    litellm_params: {model: openai/demo, api_base: URL/v1, api_key: none}
  - model_name: vllm-demo
    litellm_params: {model: hosted_vllm/demo, api_base: URL/v1, api_key: none}
  - model_name: bridge
    litellm_params: {model: hosted_vllm/demo:bridge, api_base: URL/v1, api_key: none}
"""
_LM_EVAL = """
from lm_eval.api.instance import Instance
lm = make(model=model, base_url=url + "/v1/completions", tokenizer=os.environ["MODEL"], tokenized_requests=False)
arguments = ("Where are you?", {"until": ["!!"], "max_gen_toks": 4, **more})
say(lm.generate_until([Instance(request_type="generate_until", doc={}, arguments=arguments, idx=0)]))
"""
_INSPECT = """
import asyncio
from inspect_ai.model import GenerateConfig, get_model
async def main():
    config = GenerateConfig(max_tokens=4, **more)
    found = await get_model(name, base_url=url + "/v1", api_key="none", config=config, stream=stream).generate("Where?")
    say(found.model_dump_json())
asyncio.run(main())
"""


def _named(alias: str) -> str:
    """The body of a chat to a model of the proxy."""
    return f'body = {_CHAT} | {{"model": "bridge" if way == "model" else "{alias}"}}\n'


@dataclass(frozen=True, slots=True)
class Client:
    """A client, or a gateway with the plainest client behind it."""

    name: str
    packages: tuple[str, ...]  # the first is the one that the table names; none: this project's environment
    script: str
    out: str  # the way out, as the table has it
    gateway: str = ""  # the settings of LiteLLM's proxy
    ways: tuple[str, ...] = WAYS


_OPENAI_PACKAGE = ("openai==3.57.0",)
_LITELLM_PACKAGE = ("litellm[proxy]==1.106.12",)
_LM_EVAL_PACKAGE = ("lm-eval[api]==0.4.13", "transformers")
_INSPECT_PACKAGE = ("inspect-ai==0.3.285", "openai")


def _openai(method: str, asked: str) -> str:
    """The script that calls a method of the OpenAI SDK with these fields."""
    return f"""{_OPENAI}
given = {{"model": model, {asked}, "stream": stream}}
raw = client.{method}.with_raw_response.create(**given, extra_body=extra)
found = raw.parse()
say([one.model_dump() for one in found] if stream else found.model_dump(), raw.headers)
"""


CLIENTS = (
    Client(
        "curl",
        (),
        f"""
import subprocess
body = {_CHAT}
words = ["curl", "-sSi", url + "/v1/chat/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
say(text, [text])
""",
        "none needed",
    ),
    Client(
        "OpenAI SDK, chat",
        _OPENAI_PACKAGE,
        _openai("chat.completions", '"messages": ask, "max_tokens": 4'),
        "none needed: `extra_body`, and `answer.saesteer`",
    ),
    Client(
        "OpenAI SDK, responses",
        _OPENAI_PACKAGE,
        _openai("responses", '"input": "Where?", "max_output_tokens": 4'),
        "none needed",
    ),
    Client(
        "LiteLLM SDK, `openai/`",
        _LITELLM_PACKAGE,
        f'provider = "openai"\n{_LITELLM}',
        "none needed: `extra_body`",
    ),
    Client(
        "LiteLLM SDK, `hosted_vllm/`",
        _LITELLM_PACKAGE,
        f'provider = "hosted_vllm"\n{_LITELLM}',
        "in streams, the header, or the provider `openai/`",
    ),
    *(
        Client(
            f"LiteLLM proxy, `{provider}/`",
            _LITELLM_PACKAGE,
            f'{_named(alias)}path = "/v1/chat/completions"\n{_RAW}',
            "a module for each model name in the proxy's settings; the header, as `llm_provider-x-saesteer-applied`",
            _PROXY,
        )
        for provider, alias in (("openai", "openai-demo"), ("hosted_vllm", "vllm-demo"))
    ),
    *(
        Client(
            f"LiteLLM proxy, Anthropic's `/v1/messages`, `{provider}/`",
            _LITELLM_PACKAGE,
            f'{_named(alias)}path = "/v1/messages"\n{_RAW}',
            "a module for each model name in the proxy's settings",
            _PROXY,
        )
        for provider, alias in (("openai", "openai-demo"), ("hosted_vllm", "vllm-demo"))
    ),
    Client(
        "LangChain, `ChatOpenAI`",
        ("langchain-openai==1.7.4",),
        """
from langchain_openai import ChatOpenAI
given = {"model": model, "base_url": url + "/v1", "api_key": "none", "max_tokens": 4}
chat = ChatOpenAI(**given, extra_body=extra, include_response_headers=True)
found = list(chat.stream("Where?")) if stream else [chat.invoke("Where?")]
headers = [name for one in found for name in one.response_metadata.get("headers") or ()]
say(json.dumps([one.model_dump() for one in found], default=str), headers)
""",
        "`include_response_headers=True`, and the header",
    ),
    Client(
        "LlamaIndex, `OpenAILike`",
        ("llama-index-llms-openai-like==0.8.1",),
        """
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
given = {"model": model, "api_base": url + "/v1", "api_key": "none", "is_chat_model": True, "max_tokens": 4}
llm = OpenAILike(**given, additional_kwargs={"extra_body": extra})
messages = [ChatMessage(role="user", content="Where?")]
found = list(llm.stream_chat(messages)) if stream else [llm.chat(messages)]
say([one.raw if isinstance(one.raw, dict) else one.raw.model_dump() for one in found])
""",
        "none needed: `additional_kwargs`, and `answer.raw`",
    ),
    Client(
        "Open WebUI, custom parameters",
        ("fastapi", "aiohttp", "python-mimeparse", "python-engineio", "python-socketio", "httpx"),
        """
import importlib.util, types
folder = os.environ["OPEN_WEBUI"]
# Of the whole program, the function that puts a model's parameters into a request; the rest needs a data base.
unused = {"chat_variables": ("render_chat_variables", "render_user_variables"),
          "task": ("prompt_template", "prompt_variables_template")}
for name, functions in unused.items():
    made = types.ModuleType(f"open_webui.utils.{name}")
    vars(made).update(dict.fromkeys(functions))
    sys.modules[made.__name__] = made
whole = sys.modules["open_webui"] = types.ModuleType("open_webui")
whole.__path__ = [folder + "/open_webui"]
env = types.ModuleType("open_webui.env")
env.CHAT_STREAM_RESPONSE_CHUNK_MAX_BUFFER_SIZE = 0
env.__getattr__ = lambda name: None
sys.modules["open_webui.env"] = env
from open_webui.utils.payload import apply_params_to_form_data
custom = {} if way == "model" else {"saesteer": json.dumps(spec)}
form = {"model": model, "messages": ask, "stream": stream, "params": {"custom_params": custom}}
body, path = apply_params_to_form_data(form, {}), "/v1/chat/completions"
import httpx
assert httpx.post(url + path, json=body, timeout=120).status_code == 200
say("")
""",
        "its pages show the text alone: a module as model shows which model has answered",
    ),
    Client(
        "Inspect, `openai-api/`",
        _INSPECT_PACKAGE,
        f'more = {{}} if way == "model" else {{"extra_body": extra}}\nname = f"openai-api/demo/{{model}}"\n{_INSPECT}',
        "the provider [`saesteer`](bridges.md#inspect), which ends the evaluation if the report is missing",
    ),
    Client(
        "Inspect, [`saesteer/`](bridges.md#inspect)",
        _INSPECT_PACKAGE,
        f"""
import saesteer.bridges.inspect_ai, tempfile
more = {{}}
file = tempfile.NamedTemporaryFile("w", suffix=".json")
json.dump(spec, file); file.flush()
name = f"saesteer/{{model}}" + ("" if way == "model" else f"@{{file.name}}")
{_INSPECT}
""",
        "none needed: it looks at the report of each answer itself",
    ),
    Client(
        "lm-evaluation-harness, `local-completions`",
        _LM_EVAL_PACKAGE,
        f"from lm_eval.models.openai_completions import LocalCompletionsAPI as make\nmore = extra\n{_LM_EVAL}",
        "`--gen_kwargs` reaches tasks that generate, and no log-likelihoods: a module as model reaches both, and the "
        "model [`saesteer`](bridges.md#lm-evaluation-harness) looks at the report",
        ways=("spec", "model"),
    ),
    Client(
        "lm-evaluation-harness, [`saesteer`](bridges.md#lm-evaluation-harness)",
        _LM_EVAL_PACKAGE,
        f"""
import tempfile
from functools import partial
from saesteer.bridges.lm_eval import Steered
file = tempfile.NamedTemporaryFile("w", suffix=".json")
json.dump(spec, file); file.flush()
make, more = partial(Steered, spec="" if way == "model" else file.name), {{}}
{_LM_EVAL}""",
        "none needed: it looks at the report of each answer itself",
        ways=("spec", "model"),
    ),
)
