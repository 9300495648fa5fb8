"""Turn a plain function into a strict MCP tool.

Strict means: unknown arguments are refused, errors of ours reach the model as text, every string
of a reply is valid UTF-8 and every number finite (a lone surrogate or a NaN would end the server),
and both channels of a result (structured and text) carry the same compact JSON.
"""

import functools
import inspect
import json
import math
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import BaseModel, ConfigDict

from specpilot.errors import SpecPilotError

__all__ = ["clean", "strict_tool"]


def strict_tool(
    fn: Callable[..., BaseModel], *, title: str, read_only: bool, always_load: bool = False
) -> Tool:
    """Wrap ``fn``: its docstring becomes the description, its return type the output schema."""
    reply_type = get_type_hints(fn, include_extras=True)["return"]

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> CallToolResult:
        try:
            reply = fn(*args, **kwargs)
        except SpecPilotError as error:
            raise ToolError(clean(str(error))) from error
        data = clean(reply.model_dump(mode="json"))
        text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return CallToolResult(
            content=[TextContent(type="text", text=text)], structured_content=data
        )

    signature = inspect.signature(fn, eval_str=True)
    returns = Annotated[CallToolResult, reply_type]
    call.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
    call.__annotations__ = {**get_type_hints(fn, include_extras=True), "return": returns}
    tool = Tool.from_function(
        call,
        title=title,
        annotations=ToolAnnotations(read_only_hint=read_only, open_world_hint=False),
        meta={"anthropic/alwaysLoad": True} if always_load else None,
    )
    _forbid_unknown_arguments(tool)
    return tool


def _forbid_unknown_arguments(tool: Tool) -> None:
    base = tool.fn_metadata.arg_model
    namespace = {"model_config": ConfigDict(extra="forbid"), "__module__": base.__module__}
    strict: type[BaseModel] = type(base.__name__, (base,), namespace)
    tool.fn_metadata.arg_model = strict  # type: ignore[assignment]
    tool.parameters = strict.model_json_schema(by_alias=True)


def clean(value: Any) -> Any:
    """Return ``value`` with invalid UTF-8 replaced and non-finite numbers turned into None."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value
