/* cuda_runtime_api.h includes crt/host_defines.h, which comes with another package: these macros suffice. */
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __inline__ inline
#define __forceinline__ inline
#define __noinline__
#define __no_return__
#define __location__(annotation)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __specialization_static
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
