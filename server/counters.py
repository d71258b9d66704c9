"""Counts of what a server has done, in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

_HELP = {
    "requests_total": "Requests answered, by path and HTTP status.",
    "texts_total": "Texts, by how they ended.",
    "prompt_tokens_total": "Prompt tokens, those found in a cache included.",
    "cached_tokens_total": "Prompt tokens found in a cache.",
    "prefix_hits_total": "Texts whose prompt began in a cache.",
    "generated_tokens_total": "Tokens generated; over busy_seconds_total this is tokens/s.",
    "steps_total": "Forward passes after the prompt; under the tokens this is tokens/step.",
    "drafts_total": "Drafts verified.",
    "accepted_drafts_total": "Drafts accepted; over drafts_total this is the acceptance.",
    "busy_seconds_total": "Time in which texts were generated, in seconds.",
    "waiting_requests": "Requests in the queue.",
    "running_requests": "Requests whose texts are being generated.",
    "device_bytes": "Memory in use on the device, the model's included.",
    "prompt_cache_bytes": "Memory of the caches kept for further texts.",
}


@dataclass
class Counters:
    """Counts since the server began.

    Attributes:
        requests: Requests by path and status.
        texts: Texts by how they ended: "stop", "length", "tool_calls", "cancelled" or "failed".
        totals: Other counts by the name of their metric.
    """

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    totals: defaultdict[str, float] = field(default_factory=lambda: defaultdict(int))

    def render(self, **gauges: int) -> str:
        """All counts.

        Args:
            **gauges: Numbers that go up and down, by the name of their metric.
        """
        samples: dict[str, dict[str, float]] = {
            "requests_total": {
                f'{{path="{path}",status="{status}"}}': count
                for (path, status), count in self.requests.copy().items()
            },
            "texts_total": {f'{{end="{end}"}}': count for end, count in self.texts.copy().items()},
        }
        for name in _HELP.keys() - samples:
            samples[name] = {"": gauges[name] if name in gauges else self.totals[name]}
        return "".join(f"{line}\n" for line in _lines(samples))


def _lines(samples: dict[str, dict[str, float]]) -> Iterator[str]:
    for name, text in _HELP.items():
        yield f"# HELP redrafter_{name} {text}"
        yield f"# TYPE redrafter_{name} {'counter' if name.endswith('_total') else 'gauge'}"
        for labels, value in samples[name].items():
            yield f"redrafter_{name}{labels} {value}"
