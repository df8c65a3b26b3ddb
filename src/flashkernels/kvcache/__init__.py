"""The cache of keys and values: pages, what is written to them, and how they move."""

from flashkernels.kvcache.append import append as append
from flashkernels.kvcache.cache import PagedCache as PagedCache
from flashkernels.kvcache.pages import Host as Host, copy_pages as copy_pages, gather as gather
