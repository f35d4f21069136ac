"""Chat templates in the forms of published models, and conversations for them."""

from typing import Any

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "The cat sat "},
    {"role": "assistant", "content": " on the mat."},
    {"role": "user", "content": "Who asks?\n"},
    {"role": "assistant", "content": "You are a helpful assistant."},
]
SYSTEM: list[dict[str, Any]] = [{"role": "system", "content": "Say what the answer is."}]

TEXT: dict[str, str] = {
    "llama2": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
        "{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}{% set system = false %}"
        "{% endif %}{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if loop.index0 == 0 and system != false %}"
        "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}{% else %}"
        "{% set content = m['content'] %}{% endif %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
        "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{% for m in messages %}"
        "{% set content = '<|im_start|>' + m['role'] + '\\n\\n' + m['content'] | trim + '<|im_end|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
        "{{ '<|user|>\\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
        "{{ '<|system|>\\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
        "{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
    ),
    "vicuna": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content ~ ' ' }}{% elif m.role == 'user' %}USER: "
        "{{ m.content.strip() }}{% else %}{{ ' ASSISTANT: ' ~ m.content.strip() ~ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
    ),
    "qwen2.5": (
        "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
        "{{- '<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}\n    "
        '{%- if message.role == "user" or message.role == "system" or not message.tool_calls %}\n        '
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n    {%- else %}"
        "{{- '<|im_start|>' + message.role }}{%- for call in message.tool_calls %}{{- '\\n{\"name\": \"' }}"
        "{{- call.name }}{{- '\", \"arguments\": ' }}{{- call.arguments | tojson }}{{- '}' }}{%- endfor %}"
        "{{- '<|im_end|>\\n' }}{%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    "
        "{{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
        "{% set role = m['role'] %}{% endif %}"
        "{{ '<|im_start|>' + role + '\\n' + m['content'] | trim + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<|im_start|>model\\n'}}{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "deepseek": (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
        "{% set ns = namespace(system='') %}{%- for m in messages %}{%- if m['role'] == 'system' %}"
        "{% set ns.system = m['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}"
        "{%- for m in messages %}{%- if m['role'] == 'user' %}{{ 'User: ' ~ m['content'] ~ '\\n\\n' }}"
        "{%- elif m['role'] == 'assistant' %}{{ 'Assistant: ' ~ m['content'].split('</think>')[-1] ~ eos_token }}"
        "{%- endif %}{%- endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
    "tulu": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>\\n' + m['content'] + '\\n' }}"
        "{% elif m['role'] == 'assistant' %}{% if not loop.last %}"
        "{{ '<|assistant|>\\n'  + m['content'] + eos_token + '\\n' }}{% else %}"
        "{{ '<|assistant|>\\n'  + m['content'] + eos_token }}{% endif %}{% else %}{{ m['content'] }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"
    ),
    "smollm": (
        "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}{% endif %}"
        "{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "marked": (
        "{% macro head(role) %}<|im_start|>{{ role }}\n{% endmacro %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{% continue %}{% endif %}{{ head(m.role) }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content | trim }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"
    ),
    "sectioned": (
        "{% set text %}{% for m in messages %}{{ ['<|im_start|>', m.role, '\n'] | join }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | replace('cat', 'dog') }}{% endgeneration %}"
        "{% else %}{{ [m.content, '<|im_end|>'] | join }}{% endif %}{% if loop.index == 9 %}{% break %}{% endif %}"
        "{% endfor %}{% endset %}{{ text | trim }}{{ '%s{}' % eos_token }}{{ '<s>{}'.format(messages | length) }}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
"""Of text, in the forms of Llama 2 and 3, Mistral, Zephyr, Vicuna, Qwen 2.5, Gemma, Phi-3, DeepSeek, OLMo 2 and SmolLM, and two
that use more of Jinja. Some of their control tokens are not in the tests' tokenizers, where transformers spells them as well."""

IMAGES: dict[str, str] = {
    "llava": (
        "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}"
        "{% endif %}{# Render all images first #}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}"
        "{% endfor %}{# Render all text next #}{% if message['role'] != 'assistant' %}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
        "{% endfor %}{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
        "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "smolvlm": (
        "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
        "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
    "qwen2vl": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for content in message['content'] %}"
        "{% if content['type'] == 'image' or 'image' in content %}[INST]<image>[/INST]{% elif 'text' in content %}"
        "{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
"""Of text and images."""
