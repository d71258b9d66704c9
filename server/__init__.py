"""An OpenAI-compatible server: the texts of `stream_generate`, over HTTP."""
