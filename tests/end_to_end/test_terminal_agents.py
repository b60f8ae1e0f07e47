"""Terminal agents, started as the page `clients` says: each runs a command that the model calls, and ends.

Claude Code uses /v1/messages, Codex /v1/responses, opencode /v1/chat/completions. The model is that of
tests/end_to_end/calling.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import of_page, text_of
from tests.end_to_end.calling import ANSWER, calling
from tests.end_to_end.installed import NodeClient, run
from tests.end_to_end.process import SMALL, ServerProcess

pytestmark = [
    pytest.mark.full,  # 700 MB of programs
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="node or npm is not on this machine"),
]

COMMAND = "echo seen > seen.txt"
# agent -> the tool that runs a command, the field that holds the command, and words to append to the page's line
AGENTS = {
    "claude": ("Bash", "command", ["--dangerously-skip-permissions", "--print", "look"]),
    "codex": (
        "exec_command",
        "cmd",
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "look"],
    ),
    "opencode": ("bash", "command", ["run", "look"]),
}
# The second part of an installation; npm skips it if packages may not run scripts.
FINISH = {"@anthropic-ai/claude-code": "install.cjs", "opencode-ai": "postinstall.mjs"}


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    """The folder that holds the agents' programs."""
    client = NodeClient("agents", "@anthropic-ai/claude-code@2.1", "@openai/codex@0.169", "opencode-ai@1.18")
    try:
        folder = client.done()
        for package, script in FINISH.items():
            run(["node", script], folder / "node_modules" / package)
        yield folder / "node_modules" / ".bin"
    finally:
        client.close()


def collected(agent: str) -> list[str]:
    """The words of the page's line that starts the agent, variables first."""
    (line,) = re.findall(rf"^    ((?:[A-Z_]+=\S+ )*{agent}\b.*)$", text_of("clients"), re.M)
    return shlex.split(line)


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_started_as_the_page_says_runs_the_command_of_a_call(tmp_path, programs, agent):
    tool, field, rest = AGENTS[agent]
    model = calling(tmp_path / "model", tool, {field: COMMAND, "description": "looks"})
    flags = [*SMALL, "--num-gpu-blocks-override", "16384", "--served-model-name", "coder"]
    process = ServerProcess("--model", str(model), *flags, "--reasoning-parser", "qwen3").spawn().wait_ready()
    try:
        words = [word.replace("localhost:8000", f"localhost:{process.port}") for word in collected(agent)]
        work, home = tmp_path / "work", tmp_path / "home"
        work.mkdir()
        home.mkdir()
        (settings,) = [code for code in of_page("clients", "json") if "provider" in code and "npm" in code]
        (work / "opencode.json").write_text(settings.replace("localhost:8000", f"localhost:{process.port}"))
        environment = {
            "HOME": str(home),
            "PWD": str(work),  # opencode looks for its settings there
            "PATH": f"{programs}:{os.environ['PATH']}",
            "IS_SANDBOX": "1",  # Claude Code requires this variable if it runs as root
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        printed = run(["env", *words, *rest], work, **environment)
        assert ANSWER in printed
        assert (work / "seen.txt").read_text() == "seen\n"
        process.stop()
    finally:
        process.close()


def test_the_page_s_settings_name_the_model_that_its_lines_name():
    (settings,) = [code for code in of_page("clients", "json") if "provider" in code and "npm" in code]
    assert json.loads(settings)["model"] == "omniloop/coder"
    assert all("coder" in collected(agent) for agent in ("claude", "codex"))
