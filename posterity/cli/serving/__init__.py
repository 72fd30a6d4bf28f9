"""The server of a finished run: rows come in over HTTP, predictions go out; needs FastAPI and uvicorn."""
