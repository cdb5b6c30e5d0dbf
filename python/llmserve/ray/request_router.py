"""The class of routers that Ray Serve is given.

Ray pickles the module of that class by value: what it defines is not what other modules import
under the same name. So nothing else is defined here.
"""

from llmserve.ray.places import PlaceRouter


class PrefixRouter(PlaceRouter):
    """See PlaceRouter."""
