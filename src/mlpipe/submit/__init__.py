import sys

from mlpipe import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
