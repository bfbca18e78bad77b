"""OpenAI's interface: JSON to requests, events to JSON."""
