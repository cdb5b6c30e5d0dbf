"""Any other model: the text starts with {"name": ..., "arguments": {...}}, or a list of them."""

from llmserve.parsers.call_parser import ToolStyle

STYLE = ToolStyle(name="json", begin="", is_list=True, is_bare=True)
