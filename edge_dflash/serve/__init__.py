"""The service: an open planner behind the OpenAI API, on a Unix socket or TCP. Needs the extra ``serve``."""
