"""A model of Forge as `lm_eval.api.model.LM`: the tasks of the LM Evaluation Harness (Gao et al., EleutherAI) on a model that is
being trained, or on stored weights, in any layout. Needs the extra `forge-train[eval]`."""

import itertools
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from forge_core.errors import ForgeError
from forge_core.protocols.data import Tokenizer
from forge_models.generation import NewText, Sampling, before_stop, generate
from forge_parallel import accelerator
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.placement.topology import Topology

_log = logging.getLogger(__name__)
_NEW_TOKENS = 256
"""Of a task that does not say how many: as many as the harness takes then."""

Request = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation as text, and as tokens."""


class HarnessModel(TemplateLM):
    """What tasks ask: log-likelihoods and continuations. Every rank asks the same; data ranks share the rows of log-likelihoods.

    Args:
        model: whose weights are asked as they are at that moment.
        tokenizer: its text.
        batch: rows in one forward of a rank.
        before: called before each forward of new texts, on all ranks alike, with how many there were; it may raise to leave them.
        before_all: token that stands before a text without a context, where the tokenizer's own rule puts none before a text; by
            default the one that ends documents.

    Raises:
        ForgeError: the tokenizer has no token that could stand before a text.
    """

    def __init__(
        self,
        model: ParallelModel,
        tokenizer: Tokenizer,
        *,
        batch: int = 8,
        before_all: int | None = None,
        before: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__()
        prefix = tokenizer.prefix[-1] if tokenizer.prefix else before_all
        if tokenizer.eos is None and prefix is None:
            raise ForgeError(f"tokenizer {tokenizer.name} has no token that ends a document, which tasks put before a text")
        self.laid_out, self.coder, self.batch = model, tokenizer, batch
        self.end = tokenizer.eos
        self.prefix = prefix if prefix is not None else tokenizer.eos
        self.whole: Any = model.whole()
        self.max_length: int = self.whole.shape.max_length
        self._told = False
        self._before, self._count = before, itertools.count()

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        assert self.prefix is not None
        return self.prefix if self.end is None else self.end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        assert self.prefix is not None
        return self.prefix

    @property
    def tokenizer_name(self) -> str:
        """Names caches of requests."""
        return self.coder.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a text, behind those that the tokenizer puts before each text unless `add_special_tokens` is False."""
        tokens = [int(token) for token in self.coder.encode(string)]
        return tokens if add_special_tokens is False else [*self.coder.prefix, *tokens]

    def _loglikelihood_tokens(self, requests: Sequence[Request], **_: Any) -> list[tuple[float, bool]]:
        """Collective: per request, the sum of log p(continuation | context), and whether each of its tokens is the likeliest."""
        topology = self.laid_out.topology
        pairs = [self._row(context, continuation) for _, context, continuation in requests]
        order = sorted(range(len(pairs)), key=lambda index: -len(pairs[index][0]))
        found = torch.zeros(len(pairs), 2, dtype=torch.float64)
        with self._asked():
            for first in range(0, len(order), self.batch * topology.data_size):
                chunk = order[first : first + self.batch * topology.data_size]
                self._before(next(self._count))
                count = -(-len(chunk) // topology.data_size)
                mine = chunk[topology.data_rank * count : (topology.data_rank + 1) * count]
                # Every rank makes the same forwards: ranks without a row left bring one of zeros.
                tokens = torch.zeros(count, len(pairs[chunk[0]][0]), dtype=torch.int64)
                for row, index in zip(tokens, mine, strict=False):
                    row[: len(pairs[index][0])] = torch.tensor(pairs[index][0])
                logits = self._logits(tokens.to(topology.device))
                for row, index in zip(logits, mine, strict=False):
                    found[index] = _score(row, *pairs[index])
        if topology.size > 1:
            if any(topology.layout.data_rank(rank) == topology.data_rank for rank in range(topology.rank)):
                found.zero_()  # an earlier rank has the same rows, and says so
            found = topology.all_reduce(found.to(topology.device)).cpu()
        return [(likelihood, bool(greedy)) for likelihood, greedy in found.tolist()]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Collective: as above, of texts; rank 0 shows progress."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.laid_out.topology.rank > 0)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Collective: log p of whole texts, each token once, with as much before it as the model takes."""
        windows: list[Request] = []
        counts = []
        for request in requests:
            # The first window begins with the prefix: in the tokens it would stand there twice, and be predicted.
            tokens = self.tok_encode(*request.args, add_special_tokens=False)
            given = {"token_list": tokens, "prefix_token": self.prefix_token_id}
            pairs = get_rolling_token_windows(**given, max_seq_len=self.max_length, context_len=1)
            pieces = [(("", ""), *make_disjoint_window(pair)) for pair in pairs]
            windows += pieces
            counts.append(len(pieces))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Collective: continuations up to the first of the texts `until`; all ranks make all of them.

        Raises:
            ForgeError: a task asks for a way to choose tokens that there is not.
        """
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
        texts = [""] * len(requests)
        with self._asked():
            for indices in groups.values():
                wanted = _Wanted.of(requests[indices[0]].args[1])
                room = self.max_length - wanted.tokens
                if room < 1:
                    raise ForgeError(f"a task asks for {wanted.tokens} new tokens, and model.max_length is {self.max_length}")
                prompts = {index: self._cut(self.tok_encode(requests[index].args[0]), room) for index in indices}
                order = sorted(indices, key=lambda index: -len(prompts[index]))
                for first in range(0, len(order), self.batch):
                    self._before(next(self._count))
                    chunk = order[first : first + self.batch]
                    made = self._made([prompts[index] or [self.prefix_token_id] for index in chunk], wanted)
                    texts = [made[chunk.index(index)] if index in chunk else text for index, text in enumerate(texts)]
        return texts

    def _made(self, prompts: list[list[int]], wanted: "_Wanted") -> list[str]:
        ends = () if self.end is None else (self.end,)
        rows = generate(
            self.whole,
            prompts,
            wanted.sampling,
            max_tokens=wanted.tokens,
            eos=ends,
            stop=wanted.until,
            decode=self.coder.decode,
            agree=self.laid_out.topology.from_first,
        )
        kept = [row[:-1] if row and row[-1] in ends else row for row in rows]
        added = [NewText(self.coder.decode, prompt)(row) for prompt, row in zip(prompts, kept, strict=True)]
        return [before_stop(text, wanted.until) for text in added]

    def _row(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """What the model reads, its newest tokens where that is too much, and what it is to predict at the end of it."""
        if not continuation or len(continuation) > self.max_length:
            raise ForgeError(
                f"a task has a continuation of {len(continuation)} tokens; the model takes 1 to max_length = {self.max_length}"
            )
        return self._cut(context + continuation, self.max_length + 1)[:-1], continuation

    def _cut(self, tokens: list[int], length: int) -> list[int]:
        if len(tokens) > length and not self._told:
            self._told = True
            _log.warning("texts of tasks are longer than model.max_length = %d; their newest tokens are read", self.max_length)
        return tokens[-length:]

    @contextmanager
    def _asked(self) -> Iterator[None]:
        # Compiled blocks run eagerly: each batch has another length, and each length would be another graph.
        with self.laid_out.inference(whole_sequences=True), torch.compiler.set_stance("force_eager"):
            yield

    def _logits(self, tokens: Tensor) -> Tensor:
        """(B, T) tokens -> (B, T, vocab)."""
        layout = self.laid_out.topology.layout
        if layout.pp == layout.cp == 1:
            return self.whole(tokens)
        # With a cache, ranks that share sequences, or stages, read whole ones.
        return self.whole(tokens, positions=None, cache=self.whole.new_cache(*tokens.shape))


class _Wanted:
    """How a task wants text to be made."""

    def __init__(self, until: Sequence[str], tokens: int, sampling: Sampling) -> None:
        self.until, self.tokens, self.sampling = tuple(until), tokens, sampling

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "_Wanted":
        """From the `generation_kwargs` of a task: greedy unless `do_sample` says otherwise."""
        rest = dict(given)
        until = rest.pop("until", ())
        tokens = [rest.pop(name) for name in ("max_gen_toks", "max_new_tokens") if name in rest]
        sampled = rest.pop("do_sample", rest.get("temperature", 0) > 0)
        chosen = {name: rest.pop(name) for name in ("temperature", "top_k", "top_p", "min_p") if name in rest}
        penalty = rest.pop("repetition_penalty", 1.0)
        if rest:
            raise ForgeError(
                f"a task asks for {', '.join(sorted(rest))} in generation_kwargs; generation here has no such option"
            )
        options: dict[str, Any] = {"temperature": 1.0} | chosen if sampled else {"temperature": 0.0}
        sampling = Sampling(repetition_penalty=penalty, **options)
        texts = [until] if isinstance(until, str) else list(until or ())
        return cls([text for text in texts if text], tokens[0] if tokens else _NEW_TOKENS, sampling)


def _score(logits: Tensor, read: list[int], predicted: list[int]) -> Tensor:
    """(2,) fp64: the sum of log p, and 1 where each predicted token is the likeliest, of one row (T, vocab)."""
    here = logits[len(read) - len(predicted) : len(read)]
    wide = here.to(torch.promote_types(here.dtype, torch.float32)).log_softmax(dim=-1)
    tokens = torch.tensor(predicted, device=here.device)
    greedy = (here.argmax(dim=-1) == tokens).all()
    return torch.stack([wide.gather(1, tokens[:, None]).sum().double(), greedy.double()]).cpu()


def open_tasks(names: Iterable[str], folder: Path | None) -> TaskManager:
    """The index of tasks, those of a folder of task files included.

    Raises:
        ForgeError: a name that is none of them; says which are near.
    """
    if folder is not None:
        if not folder.is_dir():
            raise ForgeError(f"the folder of tasks {folder} does not exist")
        own = TaskManager(include_path=str(folder), include_defaults=False)
        if all(name in own.all_tasks for name in names):
            return own  # those of the harness are thousands of files
    manager = TaskManager(include_path=None if folder is None else str(folder))
    for name in names:
        if name not in manager.all_tasks:
            near = get_close_matches(name, manager.all_tasks, n=3)
            hint = f"; near: {', '.join(near)}" if near else ""
            raise ForgeError(f"no task {name!r} in lm-eval, nor in {folder or 'a folder of yours'}{hint}")
    return manager


def new_tokens(names: Iterable[str], manager: TaskManager) -> Iterator[tuple[str, int]]:
    """Name and new tokens of each task that generates text, those of groups and tags included. Tasks that only Python code
    describes are left out, and no data set is loaded."""
    left, seen = list(names), set[str]()
    while left:
        name = left.pop(0)
        entry: Any = None if name in seen else manager.task_index.get(name)
        seen.add(name)
        config: dict[str, Any] = getattr(entry, "cfg", None) or {}
        # Of a tag, which has no file, `tags` are its tasks; of a task, the tags that it has.
        members: Any = config.get("task") if config else sorted(getattr(entry, "tags", ()))
        inner = [each.get("task") if isinstance(each, dict) else each for each in members] if isinstance(members, list) else []
        left += [each for each in inner if isinstance(each, str)]
        if config.get("output_type") == "generate_until":
            kwargs = config.get("generation_kwargs")
            yield name, _Wanted.of(kwargs if isinstance(kwargs, Mapping) else {}).tokens


def results_of(
    model: HarnessModel, names: Sequence[str], manager: TaskManager, shots: int | None = None, limit: int | None = None
) -> dict[str, dict[str, float]]:
    """Collective: the numbers of each task, and of groups the mean as the harness makes it, by metric; every rank gets them.

    Args:
        shots: examples before each question; what a task says by itself when absent.
        limit: questions of each task at most.
    """
    with _generators_kept():
        found: Any = simple_evaluate(
            model=model,
            tasks=list(names),
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=0,
        )
    mine = {} if found is None else {name: dict(_numbers(metrics)) for name, metrics in found["results"].items()}
    return _of_first(mine, model.laid_out.topology)  # the first process of a node has them


def _of_first(results: dict[str, dict[str, float]], topology: Topology) -> dict[str, dict[str, float]]:
    """Collective: the results of rank 0."""
    if topology.size == 1:
        return results
    payload = torch.tensor(list(json.dumps(results).encode()), dtype=torch.uint8)
    size = int(topology.from_first(torch.tensor(len(payload))))
    return json.loads(
        bytes(topology.from_first(payload if topology.rank == 0 else torch.zeros(size, dtype=torch.uint8)).tolist())
    )


@contextmanager
def _generators_kept() -> Iterator[None]:
    """The harness seeds all of Python's, numpy's and torch's; a run that goes on afterwards has its own again."""
    python, array = random.getstate(), numpy.random.get_state()
    try:
        with accelerator.random_states_kept():
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)


def _numbers(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """`acc,none` is `acc`; another filter stays in the name."""
    for key, value in metrics.items():
        metric, _, filtered = key.partition(",")
        if isinstance(value, int | float) and not isinstance(value, bool) and not metric.endswith("_stderr") and filtered:
            yield metric if filtered == "none" else key, float(value)
