"""The server: models over HTTP, with the interfaces of OpenAI and others (`rlx serve`)."""
