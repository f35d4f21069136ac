"""F5: of an address only its place is shown, and nothing of what a key calls a secret. Secrets are generated and searched for."""

import itertools
import json
import random
import string

import pytest

from forge_core.errors import Fault
from forge_core.redaction import HIDDEN, redacted, redacted_fault, redacted_text, redacted_url, secret
from forge_core.registry import Registry
from forge_train.recipe.load import load_recipe

SCHEMES = ("http", "https", "s3", "gs", "az", "redis", "postgresql+psycopg", "git+https")
PLACES = ("host.example/data/x.jsonl", "127.0.0.1:8977/x", "[::1]:80/a/b", "bucket/shard-00001.tar", "host:8080")
NAMES = ("X-Amz-Signature", "sig", "token", "auth", "q", "AWSAccessKeyId", "Expires", "se", "cookie", "sv", "%61")
KEYS = (
    *(
        "api_key",
        "apiKey",
        "API-KEY",
        "hf_token",
        "eos_hf_token",
        "token",
        "secret",
        "client_secret",
        "password",
        "passwd",
        "pwd",
        "db_pwd",
        "auth",
    ),
    *("authorization", "bearer", "cookie", "set_cookie", "dsn", "sentry_dsn", "signature", "sig", "X-Amz-Signature", "accessKey"),
    *(
        "AWS_SECRET_ACCESS_KEY",
        "credentials",
        "private_key",
        "passphrase",
        "webhook",
        "WANDB_API_KEY",
        "jwt",
        "sas",
        "basic_auth",
    ),
)
HARMLESS = (
    "tokenizer",
    "max_tokens",
    "eos_token",
    "data.tokenizer.pad_token",
    "image_token_id",
    "kv_heads",
    "author",
    "authors",
    "name",
    "path",
    "monkey",
    "keyword",
    "design",
    "sigma",
    "compass",
)


def password(draw: random.Random, odd: str) -> str:
    """The letters HUSH between others, with signs that an address has a meaning for."""
    return "".join(draw.choices(string.ascii_letters, k=3)) + f"HUSH{draw.choice(odd)}HUSH"


def addresses() -> list[str]:
    draw, found = random.Random(7), []
    for scheme, place in itertools.product(SCHEMES, PLACES):
        for odd in ("/", "@", ":", "%", "#", "?", "'", "\\", "1/", "@/:"):
            found += [f"{scheme}://user:{password(draw, odd)}@{place}"]
        found += [f"{scheme}://HUSH@{place}", f"{scheme}://:HUSH@{place}", f"{scheme}://u:HUSH@{place}#HUSH"]
        found += [f"{scheme}://{place}?{name}=HUSH&{draw.choice(NAMES)}=HUSH" for name in NAMES]
        found += [f"{scheme}://{place};session=HUSH", f"{scheme}://{place}#HUSH"]
    return found


@pytest.mark.parametrize(
    "around", ["{}", "see {}.", "'{}'", '"{}", more', "({})", "cannot open {}: 404", "a={}", "['{}', 2]", "<{}>"]
)
def test_trials_f5_of_an_address_only_its_place_is_shown(around: str) -> None:
    for address in addresses():
        shown = redacted_text(around.format(address))
        assert "HUSH" not in shown, (address, shown)
        assert redacted_text(shown) == shown, "twice is as once"
        assert address.partition("://")[0] + "://" in shown, shown


def test_trials_f5_the_place_stays() -> None:
    for scheme, place in itertools.product(SCHEMES, PLACES):
        plain = f"{scheme}://{place}"
        assert redacted_url(plain) == redacted_text(plain) == plain
        assert redacted_url(f"{plain}?sig=HUSH").startswith(plain) and redacted_url(f"{scheme}://u:p@{place}").endswith(place)
    for plain in (
        "hf://datasets/a/b@main/c.jsonl",
        "s3://bucket/shard-??.tar",
        "file:///data/a@b",
        "https://host/pkg@1.0/x",
        "a@b",
        "x",
    ):
        assert redacted_url(plain) == redacted_text(plain) == plain


@pytest.mark.parametrize("key", KEYS)
def test_trials_f5_what_a_key_calls_a_secret_is_hidden_at_any_depth(key: str) -> None:
    assert secret(key)
    deep = {"hooks": [{"store": {key: "HUSH"}}, {key: ["HUSH", {"more": "HUSH"}]}], "rows": ({key: {"x": "HUSH"}},)}
    assert "HUSH" not in str(redacted(deep)) and str(redacted(deep)).count(HIDDEN) == 4
    for text in (
        f'{key} = "HUSH"',
        f"{key} = 'HUSH'",
        f'"{key}": "HUSH"',
        f"{key}=HUSH",
        f'--hooks.0.{key}="HUSH"',
        f"x {key}=HUSH y",
    ):
        assert "HUSH" not in redacted_text(text), text
    assert (
        redacted_fault(Fault(f"hooks.0.{key}", "expected a number, not 'HUSH'")).message == f'expected a number, not "{HIDDEN}"'
    )


@pytest.mark.parametrize("key", HARMLESS)
def test_trials_f5_what_is_no_secret_stays(key: str) -> None:
    assert not secret(key)
    for text in (f'{key} = "bpe"', f"{key}=bpe", f"{key}: 12", f"{key} = 12"):
        assert redacted_text(text) == text


def test_the_ways_to_write_an_override_stay() -> None:
    for text in (
        "write --section.key=VALUE",
        "overrides are written --section.key=value",
        "--section.key=...",
        "sort=key, key=none",
    ):
        assert redacted_text(text) == text


def test_trials_f5_headers_and_tokens_that_say_what_they_are() -> None:
    letters = "a1" * 20
    for text in (
        *(f"Authorization: Bearer {letters}", f"authorization: Basic {letters}==", f"headers: bearer {letters}"),
        *(f"Set-Cookie: id={letters}; Path=/", f"x-api-key: {letters}", f"HF_TOKEN={letters} WANDB_API_KEY={letters}"),
        *(
            f"hf_{letters}",
            f"sk-{letters}",
            f"ghp_{letters}",
            f"GET /x?Signature={letters}&Expires=3 HTTP/1.1",
            "AKIAABCDEFGHIJKLMNOP",
        ),
        *(f"https_proxy=me:{letters}@proxy.corp:3128", f"eyJhbGciOiJI.{letters}.{letters}"),
    ):
        assert letters not in redacted_text(text) and "AKIA" not in redacted_text(text), text
    assert redacted({"password": 1234, "max_tokens": 12, "use_auth": True}) == {
        "password": HIDDEN,
        "max_tokens": 12,
        "use_auth": True,
    }


def test_no_key_of_forge_loses_its_text() -> None:
    """Enumerates every preset: what a checkpoint keeps of a recipe without secrets is the recipe."""
    registry = Registry()
    for name in registry.names("forge.presets"):
        recipe = load_recipe(name, (), None, registry).as_json()
        assert redacted(recipe) == json.loads(json.dumps(recipe))


def test_redaction_takes_no_longer_than_reading() -> None:
    import time

    began = time.monotonic()
    redacted_text("a" * 200_000 + "." * 50_000 + "-" * 50_000)
    assert time.monotonic() - began < 5
