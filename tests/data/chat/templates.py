"""Six chat templates in the style of published families, and conversations for them.

`BEGIN` and `END` stand where `{% generation %}` and `{% endgeneration %}` go. The tests' tokenizers have the controls `<s>`,
`</s>`, `<|im_start|>`, `<|im_end|>`, `[INST]` and `[/INST]`; families whose own tokens are called otherwise use these.
"""

from typing import Any

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Where is the cat?"},
    {"role": "assistant", "content": "On the mat."},
    {"role": "user", "content": "And the dog?\n"},
    {"role": "assistant", "content": "In the park, </s> said."},
]
SYSTEM: list[dict[str, Any]] = [{"role": "system", "content": "You are helpful."}]

CHATML = """\
{%- for message in messages %}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}BEGIN{{ message.content }}<|im_end|>END{% else %}{{ message.content }}<|im_end|>{% endif %}

{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' ~ m['role'] ~ '[/INST]\n\n' }}"
    "{% if m['role'] == 'assistant' %}BEGIN{{ m['content'] | trim ~ '<|im_end|>' }}END{% else %}"
    "{{ m['content'] | trim ~ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant[/INST]\n\n' }}{% endif %}"
)

MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set head = messages[0].content ~ '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}{{ bos_token }}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 is even) %}{{ raise_exception('after user comes assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ head if loop.first else '' }}{{ m.content }}[/INST]"
    "{% else %}BEGIN {{ m.content | trim }}{{ eos_token }}END{% endif %}{% endfor %}"
)

GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no role system') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.role == 'assistant' %}BEGIN{{ m.content.strip() }}<|im_end|>END{% else %}"
    "{{ m.content.strip() }}<|im_end|>{% endif %}\n{{ '' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)

QWEN3 = """\
{%- set last = namespace(question=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}
<|im_start|>system
Tools:{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' ~ m.content ~ '</tool_response><|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}BEGIN
        {%- if loop.index0 > last.question and m.reasoning_content %}
            {{- '<think>\\n' ~ m.reasoning_content.strip() ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>' ~ (call.function | default(call)) | tojson ~ '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}END
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

DEEPSEEK = (
    "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}{% set ns.system = m.content %}{% endfor %}"
    "{{ bos_token ~ ns.system }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' ~ m.content }}"
    "{% elif m.role == 'assistant' %}[INST]BEGIN{{ m.content ~ eos_token }}END{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[INST]{% endif %}"
)

SIX = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "qwen3": QWEN3, "deepseek": DEEPSEEK}
STOPS = {"chatml": "<|im_end|>", "llama3": "<|im_end|>", "mistral": "</s>", "gemma": "<|im_end|>", "qwen3": "<|im_end|>"}
"""The stop token of a family; `</s>` by default."""
SAID = {
    "mistral": [" On the mat.</s>", " In the park, </s> said.</s>"],
    "deepseek": ["On the mat.</s>", "In the park, </s> said.</s>"],
}
"""What is trained of `TALK`, written by hand; by default the answers and their stop token `<|im_end|>`."""
ANSWERS = ["On the mat.<|im_end|>", "In the park, </s> said.<|im_end|>"]


def marked(template: str) -> str:
    """The template with tags around all that the assistant says, its stop token included."""
    return template.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")


def unmarked(template: str) -> str:
    """The template without tags."""
    return template.replace("BEGIN", "").replace("END", "")
