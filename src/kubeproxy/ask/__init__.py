"""Answers for people who operate a node: from the planner's state to words. Pure; nothing here asks a kernel."""
