"""Verbs as commands, HTTP routes, tools of agents, pages and charts; holds no model and computes no prediction."""
