"""Counters of a server, in the text format of Prometheus."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

_HELP = {
    "requests_total": "Requests answered, by path and HTTP status.",
    "texts_total": "Texts, by the reason for their end.",
    "prompt_tokens_total": "Prompt tokens, including those found in a cache.",
    "cached_tokens_total": "Prompt tokens found in a cache.",
    "prefix_hits_total": "Texts whose prompt began with the tokens of a cache.",
    "generated_tokens_total": "Tokens generated; over busy_seconds_total this is tokens/s.",
    "steps_total": "Forward passes after the prompt; generated tokens over this are tokens/step.",
    "drafts_total": "Drafts verified.",
    "accepted_drafts_total": "Drafts accepted; over drafts_total this is the acceptance rate.",
    "busy_seconds_total": "Time during which texts were generated, in seconds.",
    "waiting_requests": "Requests in the queue.",
    "running_requests": "Requests whose texts are being generated.",
    "device_bytes": "Memory in use on the device, including the model.",
    "prompt_cache_bytes": "Memory of the prompt caches kept for later requests.",
}


@dataclass
class Counters:
    """Counters since the start of the server: of requests by path and status, and by metric.

    Texts are counted by the reason for their end: "stop", "length", "tool_calls", "cancelled" or
    "failed".
    """

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    totals: defaultdict[str, float] = field(default_factory=lambda: defaultdict(int))

    def render(self, **gauges: int) -> str:
        """Format all metrics; gauges are current values, which rise and fall, by metric."""
        samples: dict[str, dict[str, float]] = {
            "requests_total": {
                f'{{path="{path}",status="{status}"}}': count
                for (path, status), count in self.requests.copy().items()
            },
            "texts_total": {f'{{end="{end}"}}': count for end, count in self.texts.copy().items()},
        }
        for name in _HELP.keys() - samples:
            samples[name] = {"": gauges[name] if name in gauges else self.totals[name]}
        lines = []
        for name, text in _HELP.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP redrafter_{name} {text}", f"# TYPE redrafter_{name} {kind}"]
            lines += [f"redrafter_{name}{labels} {one}" for labels, one in samples[name].items()]
        return "\n".join(lines) + "\n"
