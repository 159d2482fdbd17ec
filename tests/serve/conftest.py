"""These tests need `medvl[serve]` and httpx2, which `medvl[dev]` has."""

import importlib.util

missing = [
    name
    for name in ("fastapi", "uvicorn", "python_multipart", "httpx2")
    if importlib.util.find_spec(name) is None
]
collect_ignore_glob = ["test_serve_*.py"] if missing else []
