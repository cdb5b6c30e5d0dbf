"""The signature of a class that looks at its arguments in __new__, for help() and editors."""

import inspect


class InitSignature:
    """As `__signature__` of a class: that of its __init__, when somebody asks for it."""

    def __get__(self, _instance: object, owner: type) -> inspect.Signature:
        _, *parameters = inspect.signature(owner.__init__).parameters.values()  # type: ignore[misc]
        return inspect.Signature(parameters)
