output "bucket_name" {
  description = "The bucket; models are registered as s3://<bucket_name>/<prefix>."
  value       = aws_s3_bucket.models.id
}

output "bucket_arn" {
  description = "ARN of the bucket."
  value       = local.arn
}

output "key_arn" {
  description = "Key that its objects are encrypted with; who reads them must be allowed to decrypt by it."
  value       = aws_kms_key.models.arn
}
