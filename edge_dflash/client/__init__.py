"""A planner behind an OpenAI API: the interface of ``Planner``, spoken over a socket. Needs the extra ``client``."""
