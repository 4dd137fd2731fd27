"""What a chat model writes, taken apart as it arrives: reasoning, content and tool calls."""
