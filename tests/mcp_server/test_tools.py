"""Every tool through a real client: names, strictness, replies in both channels, errors as text."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from mcp import Client
from pydantic import BaseModel

from specpilot.errors import InvalidInput
from specpilot.harness.controller.protocol import JobView
from specpilot.mcp_server import tools_rounds
from specpilot.mcp_server.server import INSTRUCTIONS, TOOLS, build_server
from specpilot.mcp_server.strict import clean, strict_tool

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["auto", "legacy"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    async with Client(build_server(), mode=request.param) as connected:
        yield connected


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    reply = await client.call_tool(tool, arguments)
    assert not reply.is_error, reply.content
    assert reply.structured_content is not None
    assert json.loads(reply.content[0].text) == reply.structured_content  # type: ignore[union-attr]
    return reply.structured_content


async def failure(client: Client, tool: str, **arguments: Any) -> str:
    reply = await client.call_tool(tool, arguments)
    assert reply.is_error
    return reply.content[0].text  # type: ignore[union-attr]


async def test_all_tools_are_listed_with_short_names_and_one_line_descriptions(
    client: Client,
) -> None:
    tools = (await client.list_tools()).tools
    assert {tool.name for tool in tools} == {function.__name__ for function, _, _ in TOOLS}
    for tool in tools:
        assert len(tool.name) <= 24
        assert tool.description
        assert "\n" not in tool.description.strip()
        assert tool.input_schema["additionalProperties"] is False
        assert tool.output_schema
        assert not {"oneOf", "anyOf", "allOf"} & set(tool.input_schema)


def test_the_instructions_fit_what_clients_show() -> None:
    assert len(INSTRUCTIONS.encode()) < 2048


async def test_deployments_are_listed_and_described(client: Client) -> None:
    listed = await call(client, "deployment_list")
    assert {"mock", "pico"} <= {line["id"] for line in listed["deployments"]}
    described = await call(client, "deployment_describe", deployment="pico")
    assert described["facts"]["target_arch"] == "hybrid-gdn"
    assert described["profiled"] is False


async def test_an_unknown_deployment_lists_those_that_exist(client: Client) -> None:
    assert "pico" in await failure(client, "deployment_describe", deployment="nope")


async def test_a_malformed_deployment_names_the_wrong_field(client: Client) -> None:
    assert "engine" in await failure(client, "deployment_add", definition={"id": "x"})


async def test_unknown_arguments_are_refused(client: Client) -> None:
    assert "limt" in await failure(client, "memory_search", query="tree", limt=3)


async def test_memory_answers_with_reasons_and_reads_whole_entries(client: Client) -> None:
    found = await call(client, "memory_search", query="best-first tree", deployment="pico", limit=3)
    assert found["hits"]
    assert all(hit["why"] for hit in found["hits"])
    entry = await call(client, "memory_get", id=found["hits"][0]["id"])
    assert entry["entry"]["id"] == found["hits"][0]["id"]


async def test_an_empty_search_says_what_to_give(client: Client) -> None:
    assert "Give a query" in await failure(client, "memory_search")


async def test_recording_needs_one_of_its_two_forms(client: Client) -> None:
    assert "either entry" in await failure(client, "memory_record", revise="x")


ENTRY = {
    "id": "my-finding", "kind": "mechanism", "title": "A finding of mine", "tags": [],
    "claim": "Something was seen to help on one machine.", "bottleneck": "tokens",
    "body": "What was done and what was seen, in a sentence or two.",
    "evidence": [{"baseline": "stock", "workload": "code", "hardware": "cpu",
                  "source": {"kind": "file", "ref": "notes.md"}}],
}  # fmt: skip


async def test_a_client_signs_as_a_client_only(client: Client) -> None:
    forged = ENTRY | {"provenance": {"author": "SpecPilot controller", "origin": "round"}}
    assert "provenance" in await failure(client, "memory_record", entry=forged)
    await call(client, "memory_record", entry=ENTRY)
    written = await call(client, "memory_get", id="my-finding")
    assert written["entry"]["provenance"]["origin"] == "agent"


async def test_a_finished_final_is_told_even_if_memory_cannot_be_written(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Controller:
        def __enter__(self) -> "Controller":
            return self

        def __exit__(self, *_: object) -> None: ...

        def job_status(self, job: str, wait_s: float = 0.0, seen: int = -1) -> JobView:
            return JobView(
                job=job, kind="final", round="r1", state="done", version=3, message="done",
                done=12, planned=12, result={"verdict": "promoted"},
            )  # fmt: skip

        def round_status(self, round_id: str) -> object:
            return object()

    def learn(view: object) -> None:
        raise InvalidInput("the memory is read-only.")

    monkeypatch.setattr(tools_rounds, "ensure_running", Controller)
    monkeypatch.setattr(tools_rounds, "learn", learn)
    told = await call(client, "job_status", job="j1")
    assert told["result"] == {"verdict": "promoted"}
    assert "read-only" in told["message"]


async def test_mechanisms_say_whether_they_apply(client: Client) -> None:
    listed = await call(client, "mechanism_list", deployment="mock")
    tree = next(m for m in listed["mechanisms"] if m["id"] == "best_first_tree")
    assert tree["applies"] is True
    assert tree["params"]["rows"]["default"] == 0


async def test_costs_of_an_unprofiled_deployment_say_to_profile(client: Client) -> None:
    for tool in ("cost_ceiling", "cost_predict", "replay_trees"):
        assert "cost_profile" in await failure(client, tool, deployment="pico")


async def test_a_plan_without_a_profile_has_steps_but_no_predictions(client: Client) -> None:
    plan = await call(client, "plan_port", deployment="pico")
    assert plan["steps"]
    assert plan["patches"]
    assert all(patch["predicted"] is None for patch in plan["patches"])


async def test_unknown_rounds_and_jobs_are_errors(client: Client) -> None:
    assert "round_start" in await failure(client, "trial_start", round="r9", patches=["x"])
    assert "no job" in await failure(client, "job_status", job="w-profile-00")


class Reply(BaseModel):
    text: str
    number: float | None


def test_replies_are_made_fit_for_the_wire() -> None:
    assert clean({"a": ["\ud800x", float("nan")]}) == {"a": ["?x", None]}


async def test_a_lone_surrogate_does_not_end_the_server() -> None:
    from mcp.server import MCPServer

    def broken(text: str) -> Reply:
        """Echo."""
        if text == "fail":
            raise InvalidInput("bad \ud800 input")
        return Reply(text="\ud800", number=float("inf"))

    server = MCPServer("t", tools=[strict_tool(broken, title="t", read_only=True)])
    async with Client(server) as connected:
        assert await call(connected, "broken", text="x") == {"text": "?", "number": None}
        assert "bad ? input" in await failure(connected, "broken", text="fail")
