"""Prompt caches kept for later texts with the same beginning, as a tree of texts.

A node holds the K/V entries of the tokens by which a text went on after another one, so that texts
with a common beginning share it. Where a model has windows or states, which cannot be shortened,
they are kept for single positions: the ends of prompts and texts, and positions at which texts
have parted once. A text begins at the longest prefix for which everything is there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.engine.text_comparison import num_same
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.proposers.lookup import Contexts
from mlx_redrafter.server.prefix_store import PrefixStore
from mlx_redrafter.target.caches.prompt_cache import num_tokens
from mlx_redrafter.target.caches.stored_cache import Arrays, count_entries, has_states
from mlx_redrafter.target.target import Target

NODE_TOKENS = 2048
# Tokens that a state has to save to be kept at a position where texts have parted.
MIN_SAVED = 16
# Distances from the end of a prompt, in tokens, at which a later prompt may part from it, as a
# template may begin an answer otherwise than it repeats one.
MAX_TAIL = 64
# Number of such distances that are remembered.
MAX_TAILS = 3
# Maximum number of texts with contexts of a lookup, which take 18 MB at 113,634 contexts.
MAX_LOOKUP_TEXTS = 8


@dataclass(eq=False)
class _Node:
    """Tokens of texts, after ``start`` tokens of the nodes above; ``name`` is that in the store.

    ``children`` follow it, or some first part of its tokens. ``states`` are the positions for which
    the store has windows and states.
    """

    name: str
    start: int
    tokens: list[int]
    children: list[_Node] = field(default_factory=list)
    states: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


# Nodes of a text, and how many of the node's tokens the text has.
_Path = list[tuple[_Node, int]]


@dataclass
class Prefix:
    """The beginning of one text that need not be processed, and states to keep on the way.

    The cache holds ``length`` tokens. At ``stops`` a chunk of the prompt has to end, to keep the
    states there; ``states`` has those kept so far, by position.
    """

    target: Target
    cache: list[Any]
    length: int
    contexts: Contexts
    stops: Collection[int] = ()
    states: dict[int, Arrays] = field(default_factory=dict)

    def left(self, done: int) -> int:
        """Return the number of tokens from ``done`` of the rest of the prompt to the next stop."""
        position = self.length + done
        following = (stop - position for stop in self.stops if stop > position)
        return min(following, default=sys.maxsize)

    def note(self, done: int) -> None:
        """Keep the states after ``done`` tokens of the rest of the prompt, if they are wanted."""
        position = self.length + done
        if position in self.stops:
            self.states[position] = self.target.caches.copy_states(self.cache)


class Prefixes:
    """The kept prompt caches of one model, for one thread.

    ``model`` identifies the weights; names on the disk begin with it.
    """

    def __init__(self, engine: Engine, store: PrefixStore, options: GenerationOptions, model: str):
        self._engine = engine
        self._store = store
        self._quantisation = options.quantisation
        self._first = _first_quantised(options)
        self._model = _hash(model, options.quantisation, self._first)[:16]
        layers, num_layers = engine.new_prompt_cache(), engine.target.num_layers
        self._has_states = has_states(layers[:num_layers])
        # A drafter's windows would have states of their own, at other positions than the target's.
        self._num_kept = num_layers if has_states(layers[num_layers:]) else len(layers)
        self._tails: list[int] = []
        # Contexts of texts and the length of the text's prompt, by its last node.
        self._contexts: dict[str, tuple[int, Contexts]] = {}

    def take(self, prompt: list[int], owner: str = "") -> Prefix:
        """Find the longest prefix of a prompt kept for its owner, but never its last token."""
        path = list(self._follow(self._root(owner), prompt))
        common = min(sum(count for _, count in path), len(prompt) - 1)
        cache, length = self._restore(path, common)
        for node, _ in reversed(path):  # the oldest tokens count as used last
            self._store.touch(node.name)
        stops = set()
        if self._has_states:
            self._learn_tail(path, common)
            last = len(prompt) - 1
            stops = {last, *(last - tail for tail in self._tails)}
            if common - length >= MIN_SAVED:
                stops.add(common)
        stops = {stop for stop in stops if stop > max(length, self._first)}
        contexts = self._take_contexts(path) or Contexts(prompt[:length])
        return Prefix(self._engine.target, cache, length, contexts, stops)

    def keep(self, tokens: list[int], num_prompt: int, prefix: Prefix, owner: str = "") -> None:
        """Keep a finished text with its prompt, as far as the cache of its prefix holds it."""
        cache = prefix.cache
        held = num_tokens(cache[: self._engine.target.num_layers]) or 0
        length = min(held, count_entries(cache))
        if not self._store.max_bytes or not length or num_prompt <= self._first:
            return
        states = dict(prefix.states)
        if self._has_states and length == held:
            states[length] = self._engine.target.caches.copy_states(cache)
        path = self._add(tokens[:length], cache, owner)
        self._contexts[path[-1][0].name] = num_prompt, prefix.contexts
        if len(self._contexts) > MAX_LOOKUP_TEXTS:
            del self._contexts[next(iter(self._contexts))]
        for position, arrays in states.items():
            for node, count in path:  # the node's further tokens are those of another text
                if node.start < position <= node.start + count and position not in node.states:
                    node.states.add(position)
                    metadata = {"node": node.name, "position": str(position)}
                    # Files of earlier programs, with a dash in the name, may be of another text.
                    self._store.put(f"{node.name}_{position}", arrays, metadata)
        for node, _ in reversed(path):
            self._store.touch(node.name)

    def _add(self, tokens: list[int], cache: list[Any], owner: str) -> _Path:
        """Add the nodes that a text lacks; return all its nodes."""
        parent = self._root(owner)
        path = list(self._follow(parent, tokens))
        for start in range(sum(count for _, count in path), len(tokens), NODE_TOKENS):
            parent = path[-1][0] if path else parent
            own = tokens[start : start + NODE_TOKENS]
            node = _Node(self._name(parent.name, start, own), start, own)
            entries = self._engine.target.caches.copy_entries(cache, start, node.end)
            metadata = {"parent": parent.name, "start": str(start), "tokens": json.dumps(own)}
            self._store.put(node.name, entries, metadata)
            parent.children.append(node)
            path.append((node, len(own)))
        return path

    def _take_contexts(self, path: _Path) -> Contexts | None:
        """Take the contexts of a text away if all of its prompt is on a path.

        So nobody drafts from a text that he has not seen, and no two texts have one table.
        """
        length = sum(count for _, count in path)
        for node, _ in reversed(path):
            if self._contexts.get(node.name, (length + 1,))[0] <= length:
                return self._contexts.pop(node.name)[1]
        return None

    def _follow(self, root: _Node, tokens: list[int]) -> Iterator[tuple[_Node, int]]:
        """Yield the nodes of a text, and how many of the node's tokens the text has."""
        node, position = root, 0
        while position < len(tokens):
            node.children = [one for one in node.children if self._store.has(one.name)]
            for following in node.children:
                if following.start == position and following.tokens[0] == tokens[position]:
                    break
            else:
                return
            own = tokens[position : following.end]
            count = len(own) if own == following.tokens else num_same(own, following.tokens)
            yield following, count
            node, position = following, position + count

    def _restore(self, path: _Path, length: int) -> tuple[list[Any], int]:
        """Make a cache of at most the first ``length`` tokens of a path, as far as all is there."""
        while True:
            length, state = self._find_states(path, length)
            if length <= 0 or length < self._first:
                return self._new_cache(), 0
            nodes = [(node, count) for node, count in path if node.start < length]
            pieces = []
            for node, count in nodes:
                entries = self._store.get(node.name)
                if entries is None:
                    break
                pieces.append((entries, count))
            if len(pieces) == len(nodes):
                break
            length = nodes[len(pieces)][0].start
        cache, target = self._new_cache(), self._engine.target
        try:
            target.caches.fill(cache, pieces, state, length, self._quantisation)
            target.caches.stock(cache[: target.num_layers])
        except (RedrafterError, KeyError, ValueError) as error:  # foreign files
            for node, _ in nodes:
                self._store.drop(node.name, error)
            return self._new_cache(), 0
        return cache, length

    def _find_states(self, path: _Path, length: int) -> tuple[int, Arrays]:
        """Return the last position up to ``length`` that has states, and these."""
        if not self._has_states:
            return length, {}
        found = [
            (position, node)
            for node, count in path
            for position in node.states
            if position <= min(length, node.start + count)
        ]
        for position, node in sorted(found, key=lambda one: -one[0]):
            state = self._store.get(f"{node.name}_{position}")
            if state is not None:
                self._store.touch(f"{node.name}_{position}")
                return position, state
            node.states.discard(position)
        return 0, {}

    def _learn_tail(self, path: _Path, common: int) -> None:
        """Remember how far before the end of an earlier prompt this one parts from it."""
        for node, _ in path[-1:]:
            for position in node.states:
                tail = position - common
                if 0 < tail <= MAX_TAIL and tail not in self._tails:
                    self._tails = [tail, *self._tails][:MAX_TAILS]

    def _new_cache(self) -> list[Any]:
        return self._engine.new_prompt_cache()[: self._num_kept]

    def _root(self, owner: str) -> _Node:
        name = _hash(self._model, owner)
        if name not in self._roots:  # clients may send any number of keys
            for other, root in list(self._roots.items()):
                if not any(self._store.has(child.name) for child in root.children):
                    del self._roots[other]
            self._roots[name] = _Node(name, 0, [])
        return self._roots[name]

    def _name(self, parent: str, start: int, tokens: list[int]) -> str:
        raw = array("q", tokens).tobytes()
        return f"{self._model}-{_hash(parent, start, hashlib.sha256(raw).hexdigest())}"

    @cached_property
    def _roots(self) -> dict[str, _Node]:
        """Nodes without tokens by their name, at which the texts of each owner begin.

        Nodes of earlier runs follow them; those whose beginnings are gone are dropped.
        """
        entries, states = [], []
        for name, found in self._store.headers(self._model):
            try:
                if "node" in found:
                    states.append((found["node"], int(found["position"]), name))
                else:
                    tokens = json.loads(found["tokens"])
                    start, parent = int(found["start"]), found["parent"]
                    if self._name(parent, start, tokens) != name:
                        raise ValueError("its name is that of other tokens")
                    entries.append((start, name, parent, tokens))
            except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
                self._store.drop(name, error)
        roots: dict[str, _Node] = {}
        nodes: dict[str, _Node] = {}
        for start, name, parent, tokens in sorted(entries):
            above = nodes.get(parent)
            if start == 0:
                above = roots.setdefault(parent, _Node(parent, 0, []))
            if above is None or not above.start <= start <= above.end or not tokens:
                self._store.drop(name)
                continue
            nodes[name] = _Node(name, start, tokens)
            above.children.append(nodes[name])
        for node, position, name in states:
            if node in nodes:
                nodes[node].states.add(position)
            else:
                self._store.drop(name)
        return roots


def _first_quantised(options: GenerationOptions) -> int:
    """Return the end of the chunk of a long prompt with which quantization begins; 0 for none.

    Shorter caches are not used, as the entries after them depend on their full precision.
    """
    how, step = options.quantisation, options.prefill_step_size
    return 0 if how is None else step * max(1, -(-how.start // step))


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
