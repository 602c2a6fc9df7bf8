"""The proxy modes, one folder per mode. A backend translates plans, which `model` makes, into kernel objects."""
