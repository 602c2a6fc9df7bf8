"""One room a proxy mode. A backend only translates plans; the semantics are in model."""
