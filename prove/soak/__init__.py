"""An hour or more of one proxy: thousands of Services change all the time, and connections are always open.

The samples must not grow, and no connection may be lost: docs/reliability.md.
"""
